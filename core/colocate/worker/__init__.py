"""Code that runs inside a slot, in the same way for every executor."""
