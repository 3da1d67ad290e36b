"""A plugin that implements no hook."""
