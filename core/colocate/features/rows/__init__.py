"""Calls whose rows end one by one: `@method(rows=...)`, methods that yield, streams. The page: docs/rows.md."""
