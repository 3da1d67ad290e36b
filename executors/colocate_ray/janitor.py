"""The janitor: a small process that outlives a driver and its proxy, for as long as it takes to end what they leave.

`python janitor.py DRIVER PROXY SESSION MARK FOLDER`: two pidfds, the proxy's session, a text that is in the environment
of everything below the proxy, and the folder of what it has started ("" where that isn't the driver's to end, but its
cluster's). It imports only the standard library, so that it is there soon and takes little.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

_LEAVES_WITHIN_S = 0.7  # a proxy whose driver is gone leaves by itself, unless it is stopped or stuck
_SWEEPS_FOR_S = 10.0
# As the supervisors of workers have it, which can't be imported here: Python's trackers remove roles' shared memory.
_TRACKERS_S = 5.0
_TRACKER = b"resource_tracker import main"
_PAUSE_S = 0.02


def main() -> None:
    """Wait for the ends of both, and leave nothing of theirs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the driver decides when it ends
    driver, proxy, session = (int(number) for number in sys.argv[1:4])
    mark, folder = sys.argv[4].encode(), sys.argv[5]
    if not _wait([driver, proxy], None, proxy):
        _wait([proxy], _LEAVES_WITHIN_S, proxy)
        try:
            signal.pidfd_send_signal(proxy, signal.SIGKILL)
        except ProcessLookupError:  # it has left by itself
            pass
        _wait([proxy], None, proxy)
    if folder:
        _sweep(session, mark)
        _wait([driver, sys.stdin.fileno()], None, proxy)  # it may look into the folder first
        shutil.rmtree(folder, ignore_errors=True)


def _wait(pidfds: list[int], patience: float | None, proxy: int) -> bool:
    """Wait until one of some processes has ended; whether the proxy has."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return proxy in [pidfd for pidfd, _ in poll.poll(None if patience is None else patience * 1000)]


def _sweep(session: int, mark: bytes) -> None:
    """End all that the proxy has started, below it or not: some outlive their parents."""
    began = time.monotonic()
    while time.monotonic() - began < _SWEEPS_FOR_S:
        others = {*map(int, filter(str.isdigit, os.listdir("/proc")))} - {os.getpid()}
        found = [pid for pid in others if _is_left(pid, session, mark)]
        if not found:
            return
        for pid in found:
            if time.monotonic() - began < _TRACKERS_S and _tracks(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # just now
                pass
        time.sleep(_PAUSE_S)


def _is_left(pid: int, session: int, mark: bytes) -> bool:
    """Return whether a process runs that the proxy has started: in its session, or with its mark."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _parent, _group, its_session, *_ = file.read().rpartition(b") ")[2].split()
        if state in (b"Z", b"X"):
            return False
        if int(its_session) == session:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except (OSError, ValueError):  # it has gone, or is another user's
        return False


def _tracks(pid: int) -> bool:
    """Whether it is, or may become, one of Python's trackers: they end by themselves when whose memory it is has."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
    except OSError:
        return False
    return not line or _TRACKER in line  # without a line it is just being executed


if __name__ == "__main__":
    main()
