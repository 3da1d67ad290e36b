"""What is known of a run."""
