"""Handles rows of TensorDicts and of types registered by `register_batch`. See docs/batches.md."""
