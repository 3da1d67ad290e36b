"""States of roles in folders, whole or not there: `group.checkpoint`, `group.restore`. The page: docs/restart.md."""
