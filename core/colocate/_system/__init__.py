"""What the framework needs of the machine and of Python: files, processes, threads, clocks, lines of code."""
