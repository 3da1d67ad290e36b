"""`python -m colocate.cli`."""

from colocate.cli import main

main()
