"""Entry point of worker processes."""

from colocate.worker.main import main

main()
