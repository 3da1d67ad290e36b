"""Wrap the machine and Python for the framework: files, processes, threads, clocks, lines of code."""
