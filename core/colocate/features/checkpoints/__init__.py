"""Checkpoints of a group, by `group.checkpoint` and `group.restore`. See docs/restart.md."""
