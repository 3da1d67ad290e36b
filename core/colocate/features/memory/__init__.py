"""Memory of roles: usage, budgets and sleep. The pages: docs/memory.md."""
