"""Starts and ends worker processes."""
