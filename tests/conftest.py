import signal

import pytest

# A shell has its background jobs ignore SIGINT, and whatever they start: the tests of Ctrl-C wouldn't work there.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def leave_nothing(no_leaks: None) -> None:
    """No test may leave anything behind."""
