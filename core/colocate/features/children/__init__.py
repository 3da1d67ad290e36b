"""Processes that a role starts by `ctx.start`, and that end when the role ends. See docs/children.md."""
