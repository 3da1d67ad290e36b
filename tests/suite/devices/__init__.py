"""The part of the suite that tests `features/devices` on every executor and is removed with the feature."""
