"""Plain functions on every worker: `group.run`. The page: docs/calls.md."""
