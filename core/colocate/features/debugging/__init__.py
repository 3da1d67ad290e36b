"""Stops in a role: `breakpoint()` in a worker process, and `connect(debug=True)`. The page: docs/look-inside.md."""
