"""Entry points: plugins by name."""
