"""Declare roles, methods and budgets, and run role objects without a worker."""
