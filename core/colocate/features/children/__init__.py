"""Processes that roles start and that end with them: `ctx.start`. The page: docs/children.md."""
