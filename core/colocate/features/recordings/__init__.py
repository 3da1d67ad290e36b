"""What the calls of a role gave, in files: recorded, replayed, compared. The page: docs/a-run-that-doesnt-learn.md."""
