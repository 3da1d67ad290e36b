"""What holds of `features/balance` on every executor: a part of the suite that goes with the feature."""
