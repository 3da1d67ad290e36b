"""What holds of `features/pausing` on every executor: a part of the suite that goes with the feature."""
