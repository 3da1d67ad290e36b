"""The inspection of a run: `runtime.graph`, `runtime.audit()` and `colocate top`. See docs/ownership.md."""
