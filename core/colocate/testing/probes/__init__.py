"""Roles that the executor suite runs. They lie in importable modules, so on a cluster they go by name."""
