"""Copies of a role's weights for another role: `colocate.sync_weights`. The page: docs/weights.md."""
