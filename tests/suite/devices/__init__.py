"""What holds of `features/devices` on every executor: a part of the suite that goes with the feature."""
