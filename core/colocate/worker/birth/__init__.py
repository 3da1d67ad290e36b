"""Start and end of a worker process."""
