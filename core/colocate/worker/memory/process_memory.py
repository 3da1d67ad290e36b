"""What a worker's process has of memory: in all, and before its first role."""

from __future__ import annotations

import os


class ProcessMemory:
    """What the worker's process has that is its own, in bytes.

    Attributes:
        empty: What it had before the first role was constructed.
    """

    def __init__(self) -> None:
        self.empty = 0

    def begin(self) -> None:
        """The worker is empty now."""
        self.empty = private_bytes()

    def look(self, pinned: int) -> dict[str, int]:
        """What there is now, by what it is called in a ledger. `pinned`: for a device's memory that sleeps."""
        return {"private": private_bytes(), "empty": self.empty, "pinned": pinned, "shared": shared_with_forks()}


def shared_with_forks() -> int:
    """The memory of this process that others have as well: what it was forked from, and its other forks."""
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Shared_Dirty:"))


def private_bytes() -> int:
    """The memory of this process that isn't mapped from files or shared on purpose."""
    # Not by psutil: each worker asks once as it starts, and to import that takes as long as all the rest of a start.
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")
