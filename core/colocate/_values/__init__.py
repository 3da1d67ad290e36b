"""Split, join and reduce values by rows, and walk the leaves of values."""
