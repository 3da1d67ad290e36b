"""What of this process's memory the C library's `malloc` has, and the interpreter's own allocator for small objects."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from colocate._system.libc import libc
from colocate._system.mappings import PAGE, Area, mappings_now, present_in, size_of, whole_pages

# Those of other threads than the first lie in stretches of so much, each at a multiple of it, and each with a header:
# whose it is, the stretch before it, its size, and how much of that may be written.
_STRETCH = 64 << 20
_HEADERS_BYTES = 256
_WORD = struct.Struct("@N")
_FLAGS, _IS_MAPPED = 7, 2  # of a piece's size, which is a multiple of 16
_START_OF_FIRST = 44  # in `/proc/self/stat`, behind the name
_LARGEST_LEFT_FOR_LATER = 1  # `M_MXFAST`, of malloc.h


class InUse(NamedTuple):
    """Bytes that were asked for and not freed, with what each piece is rounded up by.

    The interpreter takes memory in large pieces: with what it has in these for objects to come, of which nobody tells
    how much was ever touched. Nothing where nobody tells anything (glibc before 2.33, musl, an interpreter with another
    allocator).

    Attributes:
        least: If as little was as can be: it takes a piece when none of the others has room.
        most: If all of it was.
    """

    least: int
    most: int


def in_use() -> InUse:
    """What is by now."""
    told = _told()
    others = 0 if told is None else int(told.uordblks + told.hblkhd)
    least, most = _of_small_objects()
    return InUse(others + least, others + most)


_has_trimmed = False
_absent = 0  # of what was free when somebody looked, this wasn't in memory


def trim() -> None:
    """Have `malloc` give back what it holds and nobody uses; some libraries have no way to ask for it."""
    global _has_trimmed
    function = getattr(libc(), "malloc_trim", None)
    if function is not None:
        _has_trimmed = True
        function(ctypes.c_size_t(0))


def merge_at_once() -> None:
    """Have `malloc` merge a small piece that is freed with what is free beside it at once, in all of this process.

    By default glibc leaves such pieces for later, and merges all that there are when it finds no room for the next one:
    where an arena has hardly any, after some thousand operations of torch, again and again, for a twentieth of their
    time. To merge each at once takes no time that could be measured.
    """
    function = getattr(libc(), "mallopt", None)
    if function is not None:
        function(_LARGEST_LEFT_FOR_LATER, 0)


def look_at_free() -> None:
    """Let `held_back_by_now` know, here and in forks of this process, what was freed and isn't in memory."""
    global _absent
    _absent = 0
    _absent = max(0, held_back_by_now() - Heap().held_back({}))


def held_back_by_now() -> int:
    """About what was freed and is in memory still: nobody looks at all pages again before some were given back."""
    if _has_trimmed:
        return Heap().held_back({})
    if (told := _told()) is None:
        return 0
    # What was asked for and freed without being written, as what was to be received may be, is at the end mostly.
    end = libc().sbrk(0)
    absent = 0
    with contextlib.suppress(OSError):
        absent = max(0, told.keepcost - present_in(Area(end - told.keepcost, end)))
    return max(0, int(told.fordblks) - absent - _absent)


class Heap:
    """What `malloc` has handed out, and has of what was freed, as it is now."""

    def __init__(self) -> None:
        self._told = _told()
        self._arenas: list[Area] | None
        try:
            self._arenas = sorted(_arenas())
            self._there = sum(map(present_in, self._arenas))
        except OSError:  # where the kernel doesn't say it, or no descriptor is free
            self._arenas = None
        self._starts = [each.start for each in self._arenas or ()]

    def held_back(self, away: Mapping[int, int]) -> int:
        """Bytes that were freed, and are in memory still.

        Args:
            away: What was handed out and isn't in memory, as it sleeps: sizes by addresses.
        """
        if self._told is None:
            return 0
        free, in_use = int(self._told.fordblks), int(self._told.uordblks)
        if self._arenas is None:
            return free
        asleep = whole_pages((address, size) for address, size in away.items() if self._is_in_arena(address))
        return max(0, min(free, self._there - in_use + size_of(asleep)))

    def handed_out(self, pieces: Iterable[tuple[int, int]]) -> int:
        """Bytes of those pieces of memory, addresses and sizes, that are from it, and not mapped by somebody else.

        Where nobody says where it has memory, all of them count.
        """
        others: list[tuple[int, int]] = []
        found = 0
        for address, size in pieces:
            if self._arenas is None or self._is_in_arena(address):
                found += size
            else:
                others.append((address, size))
        if not others:
            return found
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return found + sum(size for address, size in others if _has_mapping(memory.fileno(), address, size))

    def _is_in_arena(self, address: int) -> bool:
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and self._arenas is not None and address < self._arenas[index].stop


def _has_mapping(memory: int, address: int, size: int) -> bool:
    """Whether a large piece is in a mapping that `malloc` has made for it: before it stands what that takes."""
    told = _word(memory, address - _WORD.size)
    whole = told & ~_FLAGS
    return bool(told & _IS_MAPPED) and whole >= size and (address - 2 * _WORD.size + whole) % PAGE == 0


def _word(memory: int, address: int) -> int:
    try:
        return int(_WORD.unpack(os.pread(memory, _WORD.size, address))[0])
    except (OSError, struct.error):  # nothing is there
        return 0


def _arenas() -> Iterator[Area]:
    """Where `malloc` has what it hands out, but for large pieces, which are mappings of their own."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_START_OF_FIRST])
    yield Area(start, libc().sbrk(0))
    # Not at the addresses themselves: another thread may give them back just now.
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for each in mappings_now():
            if not each.ours_to_replace or each.is_of_file:
                continue
            for at in range(-(-each.start // _STRETCH) * _STRETCH, each.stop, _STRETCH):
                owner, before, size, writable = (_word(memory.fileno(), at + n * _WORD.size) for n in range(4))
                is_first = not before and at < owner < at + _HEADERS_BYTES
                if 0 < size <= writable <= _STRETCH and (is_first or (before and before % _STRETCH == 0)):
                    yield Area(at, at + size)


def _told() -> Any:
    return None if (function := _mallinfo2()) is None else function()


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


_ARENAS = re.compile(rb"^(\d+) arenas \* (\d+) bytes/arena ", re.MULTILINE)
_UNUSED = re.compile(rb"^(\d+) unused pools \* (\d+) bytes ", re.MULTILINE)


def _of_small_objects() -> InUse:
    """The interpreter's arenas, for objects of up to 512 bytes: `malloc` knows nothing of them."""
    if (write := _statistics()) is None:
        return InUse(0, 0)
    library, text, size = libc(), ctypes.c_void_p(), ctypes.c_size_t()
    if not (stream := library.open_memstream(ctypes.byref(text), ctypes.byref(size))):
        return InUse(0, 0)
    try:
        write(stream)
    finally:
        library.fclose(stream)
        told = ctypes.string_at(text, size.value) if text else b""
        library.free(text)
    if (arenas := _ARENAS.search(told)) is None or (unused := _UNUSED.search(told)) is None:
        return InUse(0, 0)
    whole = int(arenas[1]) * int(arenas[2])
    return InUse(whole - min(int(unused[1]) * int(unused[2]), int(arenas[2])), whole)


@functools.cache
def _statistics() -> Any:
    """What writes the statistics of that allocator, as `sys._debugmallocstats` does to stderr."""
    function = getattr(ctypes.pythonapi, "_PyObject_DebugMallocStats", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p]
    return function
