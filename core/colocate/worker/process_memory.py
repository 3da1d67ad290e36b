"""What a worker's process has of memory besides what roles hold: as it began, by imports, and what `malloc` keeps."""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from colocate._system.malloc import Heap, held_back_by_now, in_use
from colocate._system.mappings import Mapping as Mapped
from colocate._system.mappings import merged, of_files, size_of, whole_pages


class InFiles(NamedTuple):
    """What of a process's memory lies in files, in bytes.

    Attributes:
        pages: What is its own all the same, and not private.
        absent: What roles have in files of others that isn't in memory, as nobody has read it yet.
    """

    pages: int
    absent: int


def in_files(sizes: Mapping[int, int], owns: Callable[[Mapped], bool] | None) -> InFiles:
    """What of this process's memory lies in files.

    Args:
        sizes: What roles have in memory, by addresses. Of that counts what is in files, such as weights of which the
            file is mapped, and what processes share.
        owns: Whether a mapping is of a file of its own, to which memory goes: all of it counts. None where it has none.
    """
    addresses = sorted(sizes)
    if owns is None and not addresses:
        return InFiles(0, 0)

    def most(each: Mapped) -> int:
        if owns is not None and owns(each):
            return each.stop - each.start
        # Of what has slept, only the edges are in the file that it was in; and the first piece may begin before it.
        first, last = bisect.bisect_right(addresses, each.start) - 1, bisect.bisect_left(addresses, each.stop)
        ends = ((address, address + sizes[address]) for address in addresses[max(0, first) : last])
        return sum(max(0, min(stop, each.stop) - max(start, each.start)) for start, stop in ends)

    found = of_files(most)
    theirs = [told for each, told in found.items() if owns is None or not owns(each)]
    return InFiles(sum(each.pages for each in found.values()), sum(each.size - each.there for each in theirs))


class ProcessMemory:
    """What the worker's process has that is its own, in bytes.

    Imports are looked at one at a time, and only as a whole: what a module imports in turn is part of it.

    Attributes:
        empty: What it had before the first role was constructed, without what was held back.
        code: By how much that has grown since while modules were imported.
    """

    def __init__(self) -> None:
        self.empty = 0
        self.code = 0
        self._in_use = 0  # of what was asked for, at least, likewise: by the empty worker, and by what was imported
        self._importing = threading.Lock()
        self._outermost: ModuleSpec | None = None
        self._before = self._in_use_before = 0

    def begin(self) -> None:
        """The worker is empty now."""
        self.empty = self._taken()
        self.code, self._before = 0, self.empty
        self._in_use = self._in_use_before = in_use().least

    def look(
        self, files: InFiles, owned: int, pinned: int, pieces: Iterable[tuple[int, int]], away: Mapping[int, int]
    ) -> dict[str, int]:
        """What there is now, by what it is called in a ledger.

        Args:
            files: What of the host's memory is in files.
            owned: What of the host's memory roles have.
            pinned: What was pinned for a device's memory that sleeps.
            pieces: The pieces of what roles have, also of what sleeps: addresses and sizes.
            away: The pieces that sleep, sizes by addresses.
        """
        private, heap = private_bytes() + files.pages, Heap()
        held_back = heap.held_back(away)
        edges = size_of(merged(away.items())) - size_of(whole_pages(away.items()))
        rest = private - self.empty - self.code - held_back - pinned - edges - (owned - files.absent)
        # No more than there is: memory that nobody has ever touched counts, too.
        objects = min(in_use().most - self._in_use - heap.handed_out(pieces), rest)
        return {
            "private": private,
            "empty": self.empty,
            "code": self.code,
            "held back": held_back,
            "objects": max(0, objects),
            "pinned": pinned,
            "edges": edges,
            "absent": files.absent,
            "shared": shared_with_forks(),
        }

    def notice_imports(self) -> None:
        """Have `importlib` say when it runs a module: it notes that on the module's spec, just before and after."""
        # No finder or loader does that, as their frames would be in the traceback of whatever the module raises.
        plain = ModuleSpec.__setattr__

        def noticing(spec: ModuleSpec, name: str, value: Any) -> None:
            plain(spec, name, value)
            if name == "_initializing":
                (self._begins if value else self._ends)(spec)

        setattr(ModuleSpec, "__setattr__", noticing)  # noqa: B010 - else mypy takes it for a mistake

    def _begins(self, spec: ModuleSpec) -> None:
        # Taken already, it is part of another import, or beside that of another thread. Who has it never waits.
        if self._importing.acquire(blocking=False):
            try:
                self._before, self._in_use_before = self._taken(), in_use().least
                self._outermost = spec
            except OSError:  # no descriptor is free, which isn't the module's fault
                pass
            finally:
                if self._outermost is not spec:
                    self._importing.release()

    def _ends(self, spec: ModuleSpec) -> None:
        if self._outermost is spec:
            with contextlib.suppress(OSError):
                self.code += self._taken() - self._before
                self._in_use += in_use().least - self._in_use_before
            self._outermost = None
            self._importing.release()

    def _taken(self) -> int:
        """What isn't only held back: an import may take it from that. What sleeps does so before and after one."""
        return private_bytes() - held_back_by_now()


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
