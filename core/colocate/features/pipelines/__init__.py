"""Sends calls together, as one message per worker (`group.pipeline()`). See docs/calls.md."""
