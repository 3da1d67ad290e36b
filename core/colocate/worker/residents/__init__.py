"""Results that stay in a worker, and how other workers read them."""
