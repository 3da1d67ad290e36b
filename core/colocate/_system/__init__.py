"""Helpers for files, processes, threads, clocks and lines of code."""
