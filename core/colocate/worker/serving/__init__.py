"""The worker's service for a driver: messages, their handlers, and failures."""
