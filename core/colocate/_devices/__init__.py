"""Copy device memory to and from the host, and lend device memory between workers of one machine."""
