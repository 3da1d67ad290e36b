"""Pauses and resumes background roles (`group.pause`, `group.resume`). See docs/background.md."""
