"""What tests use to fork: a child is waited for, and one that hangs is ended."""

from __future__ import annotations

import os
import resource
import signal
import threading

from colocate.testing.forking import exit_code, fork


def test_it_ends() -> None:
    child = fork()
    if child == 0:
        os._exit(3)
    assert exit_code(child) == 3


def test_it_hangs() -> None:
    """It shows where it hangs, on the standard error that it has."""
    child = fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file of it
            threading.Event().wait()
        finally:
            os._exit(3)
    assert exit_code(child, 0.1) == -signal.SIGABRT
