"""What holds of `features/rows` on every executor: a part of the suite that goes with the feature."""
