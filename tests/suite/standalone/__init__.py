"""What holds of `features/standalone`: a part of the suite that goes with the feature."""
