"""Profiles: `colocate.profile`, `colocate run --profile`. The page: docs/profile.md."""
