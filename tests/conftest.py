import pytest


@pytest.fixture(autouse=True)
def leave_nothing(no_leaks: None) -> None:
    """No test may leave anything behind."""
