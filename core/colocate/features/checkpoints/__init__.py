"""Checkpoints of a group, complete or absent: `group.checkpoint`, `group.restore`. The page: docs/restart.md."""
