"""The part of the suite that tests `features/process_groups` on every executor and is removed with the feature."""
