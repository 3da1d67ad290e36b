"""What holds of `features/children` on every executor: a part of the suite that goes with the feature."""
