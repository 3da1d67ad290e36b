"""Rows scattered over ranks by cost: `Scatter(balance=)`. The page: docs/batches.md."""
