"""Calls that are sent together, as one message per worker: `group.pipeline()`. The page: docs/calls.md."""
