"""`malloc` in workers."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import colocate
from colocate import Role, method


class Looking(Role):
    """Looks what `malloc` of its process does."""

    @method(collect=colocate.First())
    def leaves_for_later(self) -> bool:
        """Whether small pieces that are freed are left as they are."""
        return leaves_for_later()


def leaves_for_later() -> bool:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = _mallinfo2()().fsmblks
    for piece in [library.malloc(32) for _ in range(100)]:
        library.free(piece)
    return bool(_mallinfo2()().fsmblks > before)


@functools.cache
def _mallinfo2() -> Any:
    class Info(ctypes.Structure):
        _fields_ = tuple(
            (name, ctypes.c_size_t)
            for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
        )

    function = ctypes.CDLL(None).mallinfo2
    function.restype = Info
    return function


def test_workers_merge_at_once() -> None:
    """Those that are processes, and not amid some operation later; threads leave the driver's as it is."""
    with colocate.connect("local", processes=True) as runtime:
        looking = runtime.reserve(1).spawn({"looking": colocate.role(Looking)}).role("looking", Looking)
        assert not looking.leaves_for_later()
    assert leaves_for_later()
