"""Memory of roles: who has how much, what they may have, and what of it sleeps. The pages: docs/memory.md."""
