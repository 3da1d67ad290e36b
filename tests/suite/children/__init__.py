"""The part of the suite that tests `features/children` on every executor and is removed with the feature."""
