"""Protect the framework from signal handlers and finalizers, which may run users' code between any two lines."""
