"""What the process of a worker has in all."""

from __future__ import annotations

import os


class ProcessMemory:
    """What the worker's process has that is its own, in bytes.

    Attributes:
        empty: What it had before the first role was constructed.
    """

    empty = 0

    def begin(self) -> None:
        """The worker is empty now."""
        self.empty = private_bytes()

    def look(self, pinned: int) -> dict[str, int]:
        """Return what there is now, as a ledger calls it. `pinned`: for a device's memory that sleeps."""
        with open("/proc/self/smaps_rollup") as file:  # what this process was forked from has it, too, and other forks
            shared = next(1024 * int(line.split()[1]) for line in file if line.startswith("Shared_Dirty:"))
        return {"private": private_bytes(), "empty": self.empty, "pinned": pinned, "shared": shared}


def private_bytes(pid: int | None = None) -> int:
    """Return the memory of this process, or another, that isn't mapped from files or shared on purpose."""
    # Not by psutil: each worker asks once as it starts, and to import that takes as long as all the rest of a start.
    try:
        with open(f"/proc/{pid or 'self'}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:  # it is gone
        return 0
    return (resident - shared) * os.sysconf("SC_PAGESIZE")
