"""What a worker has of torch: its process groups, and its settings."""
