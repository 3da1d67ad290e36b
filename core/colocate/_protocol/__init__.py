"""What driver and worker both know."""
