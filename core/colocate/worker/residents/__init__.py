"""Results that stay in a worker, and how others read them."""
