"""What holds of `features/memory` on every executor: a part of the suite that goes with the feature."""
