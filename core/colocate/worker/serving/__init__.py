"""Serves a driver in a worker: receives and handles messages, and reports failures."""
