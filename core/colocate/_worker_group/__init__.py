"""The workers of a group: start, watch, end, restart."""
