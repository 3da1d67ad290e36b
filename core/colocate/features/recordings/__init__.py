"""Results of a role's calls, in files: recorded, replayed, compared. The page: docs/a-run-that-doesnt-learn.md."""
