"""The part of the suite that tests `features/functions` on every executor and is removed with the feature."""
