"""Find a driver's processes, on every executor: their environment has the driver's mark."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Collection

MARK = "COLOCATE_CHAOS_MARK"
_numbers = itertools.count(1)


def new() -> str:
    return f"{os.getpid()}-{next(_numbers)}"


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def marked(mark: str, besides: Collection[int] = ()) -> dict[int, str]:
    """Return the command lines of the processes with a mark, by pid, without zombies."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in besides:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if wanted not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                line = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # the process has just exited
            continue
        if line:
            found[int(entry)] = line[:200]
    return found


def gone_within(mark: str, besides: Collection[int], seconds: float) -> tuple[float, dict[int, str]]:
    """Wait until no process has the mark; return the seconds, and the processes that are left."""
    began = time.monotonic()
    while True:
        left = marked(mark, besides)
        took = time.monotonic() - began
        if not left or took > seconds:
            return took, left
        time.sleep(0.01)
