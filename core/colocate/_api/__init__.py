"""Runtimes, pools and groups: the live objects."""
