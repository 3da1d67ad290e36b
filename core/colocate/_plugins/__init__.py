"""Find plugins by name, from the entry points of installed distributions."""
