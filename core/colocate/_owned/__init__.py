"""The ownership law."""
