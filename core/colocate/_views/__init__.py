"""Sending: views."""
