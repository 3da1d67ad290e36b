"""What holds of `features/functions` on every executor: a part of the suite that goes with the feature."""
