"""Whether values fit a signature."""
