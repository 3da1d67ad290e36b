"""What holds of `features/recordings` on every executor: a part of the suite that goes with the feature."""
