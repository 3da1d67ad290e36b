"""The memory of a worker's roles: who has how much of it, what they may have, and what of it sleeps."""
