"""The weights of a role reach another one: `colocate.sync_weights`. The page: docs/weights.md."""
