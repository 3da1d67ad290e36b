"""What holds of `features/process_groups` on every executor: a part of the suite that goes with the feature."""
