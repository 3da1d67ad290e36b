"""Rows beside those of lists, arrays and tensors: of TensorDicts, and `register_batch`. The page: docs/batches.md."""
