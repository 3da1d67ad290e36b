"""A stand-in for the missing colocate on a node."""
