"""Run the command line: `python -m colocate`."""

from colocate.cli import main

main()
