"""The suite of the feature "profiling"."""
