"""Ownership and lifecycle of runtimes, pools and groups."""
