"""Stops of role code in a debugger."""
