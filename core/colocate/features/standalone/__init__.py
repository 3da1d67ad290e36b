"""Calls role objects outside any worker like views, for example `Sums().add(1)`. See docs/testing.md."""
