"""What a worker's process has of memory besides what roles hold: as it began, by imports, and what `malloc` keeps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple


class InFiles(NamedTuple):
    """What of a process's memory lies in files, in bytes.

    Attributes:
        pages: What is its own all the same, and not private.
        theirs: What roles have in files of others.
        absent: What of that isn't in memory, as nobody has read it yet.
    """

    pages: int
    theirs: int
    absent: int


class ProcessMemory:
    """What the worker's process has that is its own, in bytes.

    Imports are looked at one at a time, and only as a whole: what a module imports in turn is part of it.

    Attributes:
        empty: What it had before the first role was constructed, without what was held back.
        code: By how much it has grown since while modules were imported.
    """

    def __init__(self) -> None:
        self.empty = 0
        self.code = 0
        self._in_use = 0  # of `malloc`'s memory, likewise: by the empty worker, and by what was imported
        self._importing = threading.Lock()
        self._outermost: ModuleSpec | None = None
        self._before = self._in_use_before = 0

    def begin(self) -> None:
        """The worker is empty now."""
        private, malloced = private_bytes(), Malloced.now()
        self.empty = private - malloced.held_back
        self.code, self._before = 0, private
        self._in_use = self._in_use_before = malloced.in_use

    def look(self, files: InFiles, owned: int, asleep: int, pinned: int) -> dict[str, int]:
        """What there is now, by what it is called in a ledger.

        Args:
            files: What of the host's memory is in files.
            owned: What of the host's memory roles have.
            asleep: What they have besides that is in files: `malloc` takes it for memory in use.
            pinned: What was pinned for a device's memory that sleeps.
        """
        private, malloced = private_bytes() + files.pages, Malloced.now()
        rest = private - self.empty - self.code - malloced.held_back - pinned - (owned - files.absent)
        # No more than there is: `malloc` counts memory that nobody has ever touched, too.
        objects = min(malloced.in_use - self._in_use - (owned - files.theirs) - asleep, rest)
        return {
            "private": private,
            "empty": self.empty,
            "code": self.code,
            "held back": malloced.held_back,
            "objects": max(0, objects),
            "pinned": pinned,
            "absent": files.absent,
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
                self._before, self._in_use_before = private_bytes(), Malloced.now().in_use
            except OSError:  # no descriptor is free, which isn't the module's fault
                self._importing.release()
            else:
                self._outermost = spec

    def _ends(self, spec: ModuleSpec) -> None:
        if self._outermost is spec:
            with contextlib.suppress(OSError):
                self.code += private_bytes() - self._before
                self._in_use += Malloced.now().in_use - self._in_use_before
            self._outermost = None
            self._importing.release()


def private_bytes() -> int:
    """The memory of this process that isn't mapped from files or shared on purpose."""
    # Not by psutil: each worker asks once as it starts, and to import that takes as long as all the rest of a start.
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


class Malloced(NamedTuple):
    """What the C library's `malloc` says; nothing where it doesn't (glibc before 2.33, musl).

    Attributes:
        in_use: What was asked for and not freed, with what each piece is rounded up by.
        held_back: What was freed and is kept.
    """

    in_use: int
    held_back: int

    @classmethod
    def now(cls) -> Malloced:
        """As it is now, in all of its arenas."""
        if (function := _mallinfo2()) is None:
            return cls(0, 0)
        told = function()
        return cls(told.uordblks + told.hblkhd, told.fordblks)


@functools.cache
def _mallinfo2() -> Any:
    class Info(ctypes.Structure):
        _fields_ = tuple(
            (name, ctypes.c_size_t)
            for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
        )

    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = Info
    return function
