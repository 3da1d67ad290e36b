"""The part of the suite that tests `features/weights` on every executor and is removed with the feature."""
