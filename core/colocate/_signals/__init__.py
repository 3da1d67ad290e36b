"""Protect the framework from signal handlers and finalizers: users' code may run between any two lines."""
