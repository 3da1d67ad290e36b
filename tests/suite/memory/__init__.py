"""The part of the suite that tests `features/memory` on every executor and is removed with the feature."""
