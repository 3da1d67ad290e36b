"""Plugins that are wrong, each in its own way."""
