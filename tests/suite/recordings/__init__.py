"""The part of the suite that tests `features/recordings` on every executor and is removed with the feature."""
