"""The part of the suite that tests `features/kinds` on every executor and is removed with the feature."""
