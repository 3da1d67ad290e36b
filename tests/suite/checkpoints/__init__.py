"""The part of the suite that tests `features/checkpoints` on every executor and is removed with the feature."""
