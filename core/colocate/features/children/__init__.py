"""Processes that roles start, and that end with the role: `ctx.start`. The page: docs/children.md."""
