"""The memory feature: memory use of roles, budgets, and sleep. The user's page is docs/memory.md."""
