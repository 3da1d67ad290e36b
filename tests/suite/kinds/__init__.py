"""What holds of `features/kinds` on every executor: a part of the suite that goes with the feature."""
