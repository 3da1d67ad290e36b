"""Calls with rows that end one by one: `@method(rows=...)`, methods that yield, and streams. See docs/rows.md."""
