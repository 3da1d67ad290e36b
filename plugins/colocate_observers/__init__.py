"""Observers for common experiment trackers, such as `observe: [tensorboard]` in a config. Each needs its pip extra."""
