"""Role objects outside any worker, whose methods are called as a view's: `Sums().add(1)`. The page: docs/testing.md."""
