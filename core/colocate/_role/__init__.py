"""Declarations of users (roles, methods, budgets), and role objects that run without a worker."""
