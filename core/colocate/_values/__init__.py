"""Rows of values: split, join, reduce, walk."""
