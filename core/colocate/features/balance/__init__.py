"""Rows over ranks by what they cost: `Scatter(balance=)`. The page: docs/batches.md."""
