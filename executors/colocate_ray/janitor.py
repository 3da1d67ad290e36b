"""The janitor: a small process that outlives a driver and the proxy, and kills processes left by both.

Run as `python janitor.py DRIVER PROXY SESSION MARK FOLDER`. DRIVER and PROXY are pidfds. SESSION is the proxy's session
id. MARK is a text in the environment of every process below the proxy. FOLDER is the proxy's folder, or "" if the
janitor must not kill processes below the proxy. Only the standard library is imported, so that the janitor starts soon.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

# The proxy of a dead driver exits by itself within this time, unless the proxy is stopped or stuck.
_LEAVES_WITHIN_S = 0.7
_SWEEPS_FOR_S = 10.0
# The next two values are the same as in the workers' supervisors, which can't be imported here.
# Python's resource trackers remove shared memory of roles, and need time for this.
_TRACKERS_S = 5.0
_TRACKER = b"resource_tracker import main"
_PAUSE_S = 0.02


def main() -> None:
    """Wait until driver and proxy have ended, then kill the proxy's remaining processes."""
    # No signal ends the janitor, because the driver decides when the janitor ends.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    driver, proxy, session = (int(number) for number in sys.argv[1:4])
    mark, folder = sys.argv[4].encode(), sys.argv[5]
    if not _wait_for_any([driver, proxy], None, proxy):
        _wait_for_any([proxy], _LEAVES_WITHIN_S, proxy)
        try:
            signal.pidfd_send_signal(proxy, signal.SIGKILL)
        except ProcessLookupError:  # The proxy process that the janitor watches has already exited.
            pass
        _wait_for_any([proxy], None, proxy)
    if folder:
        _end_leftovers(session, mark)
        _wait_for_any(
            [driver, sys.stdin.fileno()], None, proxy
        )  # The removal waits, because the driver may still read logs in the folder.
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_any(pidfds: list[int], patience: float | None, proxy: int) -> bool:
    """Wait until one of the processes has ended, and return whether the proxy has ended."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return proxy in [pidfd for pidfd, _ in poll.poll(None if patience is None else patience * 1000)]


def _end_leftovers(session: int, mark: bytes) -> None:
    """Kill all processes that the proxy has started, including those with a dead parent."""
    began = time.monotonic()
    while time.monotonic() - began < _SWEEPS_FOR_S:
        pids = {*map(int, filter(str.isdigit, os.listdir("/proc")))} - {os.getpid()}
        leftovers = [pid for pid in pids if _is_leftover(pid, session, mark)]
        if not leftovers:
            return
        for pid in leftovers:
            if time.monotonic() - began < _TRACKERS_S and _is_tracker(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # The process has just ended.
                pass
        time.sleep(_PAUSE_S)


def _is_leftover(pid: int, session: int, mark: bytes) -> bool:
    """Return whether a process is alive and was started by the proxy, as the process's session or environment shows."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _parent, _group, its_session, *_ = file.read().rpartition(b") ")[2].split()
        if state in (b"Z", b"X"):
            return False
        if int(its_session) == session:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except (OSError, ValueError):  # The process is gone, or belongs to another user.
        return False


def _is_tracker(pid: int) -> bool:
    """Return whether a process is, or may become, a Python resource tracker. Trackers end by themselves."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
    except OSError:
        return False
    return not line or _TRACKER in line  # A process in the middle of an exec has an empty command line.


if __name__ == "__main__":
    main()
