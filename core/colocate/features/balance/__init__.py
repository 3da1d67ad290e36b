"""Scatters rows over ranks by their cost (`Scatter(balance=)`). See docs/batches.md."""
