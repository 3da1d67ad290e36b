"""The part of the suite that tests `features/looking` on every executor and is removed with the feature."""
