"""Runs plain functions on every worker (`group.run`). See docs/calls.md."""
