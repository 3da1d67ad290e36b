"""Collect the exit codes of child processes."""

from __future__ import annotations

import logging
import os
import signal

from colocate._system.libc import libc

_logger = logging.getLogger("colocate")


def keep_exit_codes() -> None:
    """Reset an ignored SIGCHLD, so that the kernel keeps children's exit codes. Call before the first child starts.

    A parent process may have set SIGCHLD to be ignored, to avoid zombies.
    """
    with open("/proc/self/status") as file:
        ignored = int(file.read().partition("SigIgn:")[2].split()[0], 16)
    if ignored >> signal.SIGCHLD - 1 & 1:
        # `signal.signal` works on the main thread only. The default action of SIGCHLD does nothing.
        libc().signal(signal.SIGCHLD, None)
        _logger.info("SIGCHLD was ignored in this process: it isn't any more, so that ends of processes are told")


def wait_for_exit(pid: int) -> int | None:
    """Wait until a child process ends, and reap the process.

    Returns:
        The exit code, or the negative number of a signal; None if other code has reaped the child, or the kernel
            keeps no exit codes.
    """
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None
