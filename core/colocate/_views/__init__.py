"""Sending: views, functions."""
