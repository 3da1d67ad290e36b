"""The law of signals, and that of collectors: users' code may run between any two lines of the framework."""
