"""Looking on: `runtime.graph`, `runtime.audit()`, `colocate top`. The page: docs/ownership.md."""
