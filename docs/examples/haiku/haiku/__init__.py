"""Counts syllables."""
