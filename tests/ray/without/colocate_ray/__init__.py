"""Stands where colocate should be on a node, and isn't."""
