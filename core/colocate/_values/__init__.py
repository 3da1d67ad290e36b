"""Split, join, reduce and walk values by rows."""
