"""The part of the suite that tests `features/standalone` and is removed with the feature."""
