"""Calls with rows that end one by one: `@method(rows=...)`, methods that yield, streams. The page: docs/rows.md."""
