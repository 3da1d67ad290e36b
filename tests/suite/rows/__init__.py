"""Tests of `features/rows` on every executor; the folder is removed with the feature."""
