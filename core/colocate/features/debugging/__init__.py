"""Debugging of role code by `breakpoint()` in a worker process or `connect(debug=True)`. See docs/look-inside.md."""
