"""Stops in roles."""
