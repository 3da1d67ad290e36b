"""Forked children: made without a warning, and waited for, but never for ever."""

from __future__ import annotations

import os
import select
import signal
import warnings

from colocate.testing.waiting import PATIENCE_S


def fork() -> int:
    """Fork, and say nothing of the threads that there are: that is the point of who tries it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later
        return os.fork()


def exit_code(child: int, within_s: float = PATIENCE_S) -> int:
    """Wait for a forked child; what it ended with, as `os.waitstatus_to_exitcode` says it.

    One that hangs is ended by SIGABRT: faulthandler, which pytest enables, shows where it was.

    Args:
        child: Its process id.
        within_s: Seconds that it has.
    """
    descriptor = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(within_s * 1000):
            os.kill(child, signal.SIGABRT)
    finally:
        os.close(descriptor)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
