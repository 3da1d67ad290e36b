"""The birth of a worker's process, and its end."""
