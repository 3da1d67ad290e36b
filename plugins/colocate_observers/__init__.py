"""Observers for common experiment trackers, an extra each: `observe: [tensorboard]` in a config."""
