"""Memory of devices: copies to and from the host's, and what workers of one machine lend each other."""
