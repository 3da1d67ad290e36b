"""Role objects outside any worker, called like views: `Sums().add(1)`. The page: docs/testing.md."""
