"""Calls methods of role objects outside any worker, such as `Sums().add(1)`, as views do. See docs/testing.md."""
