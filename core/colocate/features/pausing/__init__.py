"""Background roles that stop and go on: `group.pause`, `group.resume`. The page: docs/background.md."""
