"""The code of a worker, which is the same for every executor."""
