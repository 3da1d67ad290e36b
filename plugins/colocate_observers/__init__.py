"""Observers for the trackers that people use, each an extra of its own name: `observe: [tensorboard]` in a config."""
