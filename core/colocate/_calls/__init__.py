"""One order of calls, the hold, deadlines."""
