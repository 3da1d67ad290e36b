"""The part of the suite that tests `features/pausing` on every executor and is removed with the feature."""
