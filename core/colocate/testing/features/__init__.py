"""The suites of features, a folder each: without its feature it is deleted, too."""
