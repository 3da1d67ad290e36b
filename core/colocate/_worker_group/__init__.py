"""Start, watch, end and restart the workers of a group."""
