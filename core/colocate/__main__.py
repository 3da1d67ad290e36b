"""`python -m colocate`."""

from colocate.cli import main

main()
