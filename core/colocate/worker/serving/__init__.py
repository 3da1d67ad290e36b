"""Serving a driver: what comes, what is done about it, and what goes wrong."""
