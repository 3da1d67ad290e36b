"""The part of the suite that tests `features/pipelines` on every executor and is removed with the feature."""
