"""The part of the suite that tests `features/balance` on every executor and is removed with the feature."""
