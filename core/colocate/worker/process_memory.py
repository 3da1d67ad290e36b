"""What a worker's process has of memory besides what roles hold: as it began, by imports, and what `malloc` keeps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from importlib.machinery import ModuleSpec
from typing import Any


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
        self._importing = threading.Lock()
        self._outermost: ModuleSpec | None = None
        self._before = 0

    def begin(self) -> None:
        """The worker is empty now."""
        private = private_bytes()
        self.empty = private - held_back_bytes()
        self.code, self._before = 0, private

    def look(self, elsewhere: int) -> dict[str, int]:
        """What there is now, by what it is called in a ledger; `elsewhere`: what is its own, and not private."""
        return {
            "private": private_bytes() + elsewhere,
            "empty": self.empty,
            "code": self.code,
            "held back": held_back_bytes(),
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
                self._before = private_bytes()
            except OSError:  # no descriptor is free, which isn't the module's fault
                self._importing.release()
            else:
                self._outermost = spec

    def _ends(self, spec: ModuleSpec) -> None:
        if self._outermost is spec:
            with contextlib.suppress(OSError):
                self.code += private_bytes() - self._before
            self._outermost = None
            self._importing.release()


def private_bytes() -> int:
    """The memory of this process that isn't mapped from files or shared on purpose."""
    # Not by psutil: each worker asks once as it starts, and to import that takes as long as all the rest of a start.
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def held_back_bytes() -> int:
    """What was freed and `malloc` has kept; 0 where the C library doesn't say (glibc before 2.33, musl)."""
    told = _mallinfo2()
    return 0 if told is None else int(told().fordblks)


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
