"""Profiling of ranks by `colocate.profile` or `colocate run --profile`. See docs/profile.md."""
