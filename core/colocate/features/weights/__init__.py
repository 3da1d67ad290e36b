"""Copy a role's weights to another role (`colocate.sync_weights`); see docs/weights.md."""
