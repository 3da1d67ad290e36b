"""The janitor: a small process that outlives a driver and a proxy, and kills the processes left by both.

`python janitor.py DRIVER PROXY SESSION MARK FOLDER`: two pidfds, the proxy's session, a text in the environment of
every process below the proxy, and the proxy's folder ("" for processes of a cluster, which the janitor leaves alone).
Only the standard library is imported, so that the janitor starts soon and stays small.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

_LEAVES_WITHIN_S = 0.7  # seconds; the proxy of a dead driver exits by itself, unless stopped or stuck
_SWEEPS_FOR_S = 10.0
# Same values as in the supervisors of workers, which can't be imported here. Python's trackers remove roles' shared
# memory.
_TRACKERS_S = 5.0
_TRACKER = b"resource_tracker import main"
_PAUSE_S = 0.02


def main() -> None:
    """Wait for the ends of driver and proxy, then end the proxy's remaining processes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the driver decides when the janitor ends
    driver, proxy, session = (int(number) for number in sys.argv[1:4])
    mark, folder = sys.argv[4].encode(), sys.argv[5]
    if not _wait([driver, proxy], None, proxy):
        _wait([proxy], _LEAVES_WITHIN_S, proxy)
        try:
            signal.pidfd_send_signal(proxy, signal.SIGKILL)
        except ProcessLookupError:  # the proxy has exited by itself
            pass
        _wait([proxy], None, proxy)
    if folder:
        _sweep(session, mark)
        _wait([driver, sys.stdin.fileno()], None, proxy)  # the driver may first read logs in the folder
        shutil.rmtree(folder, ignore_errors=True)


def _wait(pidfds: list[int], patience: float | None, proxy: int) -> bool:
    """Wait until one of some processes has ended; return whether the proxy has ended."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return proxy in [pidfd for pidfd, _ in poll.poll(None if patience is None else patience * 1000)]


def _sweep(session: int, mark: bytes) -> None:
    """Kill all processes that the proxy has started, including those with a dead parent."""
    began = time.monotonic()
    while time.monotonic() - began < _SWEEPS_FOR_S:
        pids = {*map(int, filter(str.isdigit, os.listdir("/proc")))} - {os.getpid()}
        leftovers = [pid for pid in pids if _is_left(pid, session, mark)]
        if not leftovers:
            return
        for pid in leftovers:
            if time.monotonic() - began < _TRACKERS_S and _tracks(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # ended just now
                pass
        time.sleep(_PAUSE_S)


def _is_left(pid: int, session: int, mark: bytes) -> bool:
    """Return whether a process is alive and was started by the proxy: the session or the mark is the proxy's."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _parent, _group, its_session, *_ = file.read().rpartition(b") ")[2].split()
        if state in (b"Z", b"X"):
            return False
        if int(its_session) == session:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except (OSError, ValueError):  # the process is gone, or another user's
        return False


def _tracks(pid: int) -> bool:
    """Return whether a process is, or may become, a Python resource tracker: trackers end by themselves, last."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
    except OSError:
        return False
    return not line or _TRACKER in line  # an empty command line belongs to a process in the middle of an exec


if __name__ == "__main__":
    main()
