"""Fork children without a warning, and wait for their exit within a time limit."""

from __future__ import annotations

import os
import select
import signal
import warnings

from colocate.testing.waiting import PATIENCE_S


def fork() -> int:
    """Fork without Python's warning about other threads: tests fork beside threads on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later
        return os.fork()


def exit_code(child: int, within_s: float = PATIENCE_S) -> int:
    """Wait for a forked child; return its exit code as `os.waitstatus_to_exitcode` does.

    A child that hangs is ended by SIGABRT: faulthandler, which pytest enables, prints its stack.

    Args:
        child: The child's process id.
        within_s: Seconds until the child counts as hanging.
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
