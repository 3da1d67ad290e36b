"""Messages between driver, workers and keepers, and definitions that both sides share."""
