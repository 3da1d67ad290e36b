"""Stores the results that stay in a worker, and reads residents of other workers."""
