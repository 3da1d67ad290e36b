"""Record, replay and compare the results of a role's calls. The user's page is docs/a-run-that-doesnt-learn.md."""
