"""What holds of `features/pipelines` on every executor: a part of the suite that goes with the feature."""
