"""What holds of `features/looking` on every executor: a part of the suite that goes with the feature."""
