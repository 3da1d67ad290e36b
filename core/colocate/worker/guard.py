"""The guard: a few hundred kilobytes of shell that end what a worker's roles have started, when the worker is gone.

A worker leads a process group of its own. The guard, outside of it, holds the reading end of a pipe whose writing end
only the worker has: when that ends, however the worker died, the guard kills the rest of the group.
"""

from __future__ import annotations

import os
import subprocess


def start_guard() -> None:
    """Tie the children of this process, present and future, to its life. Once per process, before roles come."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    reading, writing = os.pipe()
    subprocess.Popen(
        ["/bin/sh", "-c", f"read _; kill -s KILL -- -{os.getpid()} 2>/dev/null"],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ).returncode = 0  # nobody waits for it: it ends after this process
    os.close(reading)
    # A forked child would keep the pipe open; others don't inherit it.
    os.register_at_fork(after_in_child=lambda: _close(writing))


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:  # the child's parent was a forked child itself
        pass
