"""Collect the exit codes of child processes."""

from __future__ import annotations

import logging
import os
import signal

from colocate._system.libc import libc

_logger = logging.getLogger("colocate")


def hear_of_ends() -> None:
    """Make the kernel keep the exit codes of this process's children; call before the first child starts.

    The kernel keeps none while SIGCHLD is ignored, as a parent process may have arranged to avoid zombies.
    """
    with open("/proc/self/status") as file:
        ignored = int(file.read().partition("SigIgn:")[2].split()[0], 16)
    if ignored >> signal.SIGCHLD - 1 & 1:
        # Not by `signal.signal`, which needs the main thread. The default action is to do nothing.
        libc().signal(signal.SIGCHLD, None)
        _logger.info("SIGCHLD was ignored in this process: it isn't any more, so that ends of processes are told")


def wait_for(pid: int) -> int | None:
    """Wait for the end of a child, and reap the process.

    Returns:
        The exit code, or the negative number of a signal; None if other code has reaped the child, or the kernel
            keeps no exit codes.
    """
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None
