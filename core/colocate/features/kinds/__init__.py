"""Rows of TensorDicts, and of types registered by `register_batch`. The page: docs/batches.md."""
