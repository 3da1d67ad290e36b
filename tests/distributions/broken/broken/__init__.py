"""Broken plugins, each in its own way."""
