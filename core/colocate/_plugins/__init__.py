"""Plugins by name, from entry points."""
