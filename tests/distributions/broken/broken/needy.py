import a_missing_library  # noqa: F401
