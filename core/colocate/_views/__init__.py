"""Sending: views, pipelines, functions."""
