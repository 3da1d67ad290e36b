"""Code that runs inside a slot; the same for every executor."""
