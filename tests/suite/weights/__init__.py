"""What holds of `features/weights` on every executor: a part of the suite that goes with the feature."""
