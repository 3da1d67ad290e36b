"""How a process that this one has started has ended."""

from __future__ import annotations

import logging
import os
import signal

from colocate._system.libc import libc

_logger = logging.getLogger("colocate")


def hear_of_ends() -> None:
    """Have the kernel keep how children of this process end, before one is started.

    It doesn't where SIGCHLD is ignored, as whoever has started this process may have it, so as to have no zombies.
    """
    with open("/proc/self/status") as file:
        ignored = int(file.read().partition("SigIgn:")[2].split()[0], 16)
    if ignored >> signal.SIGCHLD - 1 & 1:
        # Not by `signal.signal`, which is for the main thread. The default is to do nothing.
        libc().signal(signal.SIGCHLD, None)
        _logger.info("SIGCHLD was ignored in this process: it isn't any more, so that ends of processes are told")


def wait_for(pid: int) -> int | None:
    """Wait for the end of a child of this process, and take it away.

    Returns:
        Its exit code, or a signal below zero; None where nobody knows: somebody else has waited for it, or has had the
        kernel keep nothing.
    """
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None
