"""The live objects."""
