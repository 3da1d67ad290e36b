"""Looking into a run: `runtime.graph`, `runtime.audit()`, `colocate top`. The page: docs/ownership.md."""
