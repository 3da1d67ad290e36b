"""What holds of `features/checkpoints` on every executor: a part of the suite that goes with the feature."""
