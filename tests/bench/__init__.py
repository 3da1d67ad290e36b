"""`python -m tests.bench`: the project's numbers in one table."""
