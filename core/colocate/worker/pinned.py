"""Pinned memory of the host, to which a device's goes as it sleeps: it grows to what sleeps at once, and is kept.

Torch pins powers of two, one page after the other. Here several threads touch the pages first, which are huge ones
where the kernel has such: that takes a fifth of the time (docs/gpu.md).
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs

from colocate._definitions.cuda_driver import DriverError, driver
from colocate._system.by_threads import by_threads
from colocate._system.imported import imported
from colocate._system.room import free_memory
from colocate._system.sizes import size_text
from colocate.gpus import in_use

GRAIN = 512  # bytes: where pieces may begin
_REGION_BYTES = 2 << 20  # a huge page
_THREADS = 8
_TOUCHED_BYTES = 64 << 20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, Linux 4.14


class _Span(NamedTuple):
    """Bytes of a region that are nobody's."""

    region: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class _Spans:
    """What is nobody's: spans of which none begins where another one ends."""

    def __init__(self) -> None:
        self._placed: list[_Span] = []  # by where they are
        self._sized: list[tuple[int, _Span]] = []

    def __len__(self) -> int:
        return len(self._placed)

    @property
    def size(self) -> int:
        return sum(size for size, _ in self._sized)

    def best(self, nbytes: int) -> _Span:
        """Takes the smallest that has room for so much; else the largest, which has for some of it."""
        at = bisect.bisect_left(self._sized, (nbytes,))
        found = self._sized[min(at, len(self._sized) - 1)][1]
        self._remove(found)
        return found

    def give(self, span: _Span) -> None:
        """It is nobody's, and so one with those beside it that are nobody's."""
        at = bisect.bisect_left(self._placed, span)
        beside = self._placed[max(0, at - 1) : at + 1]
        for other in beside:
            if other.region == span.region and other.stop == span.start:
                self._remove(other)
                span = span._replace(start=other.start)
            elif other.region == span.region and other.start == span.stop:
                self._remove(other)
                span = span._replace(stop=other.stop)
        bisect.insort(self._placed, span)
        bisect.insort(self._sized, (span.size, span))

    def _remove(self, span: _Span) -> None:
        del self._placed[bisect.bisect_left(self._placed, span)]
        del self._sized[bisect.bisect_left(self._sized, (span.size, span))]


@attrs.frozen(eq=False)
class Room:
    """Some of the memory: it is taken for as long as there is a reference to this.

    Attributes:
        parts: Its bytes, as tensors, one after the other.
    """

    parts: tuple[Any, ...]


class Arena:
    """The memory, for one device."""

    def __init__(self, device: str, free: Callable[[], int] = free_memory) -> None:
        """Args: device: As torch calls it. free: How much of the host's memory is free."""
        self._device = device
        self._free_on_host = free
        self._regions: list[Any] = []  # as tensors of bytes
        self._spans = _Spans()
        self._left: deque[_Span] = deque()  # by rooms that are gone; on whatever thread, amid whatever else

    @property
    def nbytes(self) -> int:
        """How much of the process's own memory there is, taken or not: torch's is shared with the driver."""
        return sum(region.numel() for region in list(self._regions) if not region.untyped_storage().resizable())

    def reserve(self, sizes: list[int]) -> None:
        """Have room for pieces of such sizes, which are then taken one by one.

        Raises:
            MemoryError: The host hasn't that much.
        """
        while self._left:
            self._spans.give(self._left.popleft())
        more = sum(map(_rounded, sizes)) - self._spans.size
        if more <= 0:
            return
        more = -(-more // _REGION_BYTES) * _REGION_BYTES
        if more > (free := self._free_on_host()):
            raise MemoryError(self._lack(more, f"{size_text(free)} are free"))
        try:
            regions = pinned(more, self._device)
        except (OSError, RuntimeError) as error:
            raise MemoryError(self._lack(more, str(error).partition("\n")[0])) from error
        for region in regions:
            self._regions.append(region)
            self._spans.give(_Span(len(self._regions) - 1, 0, region.numel()))

    def take(self, nbytes: int) -> Room:
        """Some of what was reserved."""
        taken, needed = [], _rounded(nbytes)
        while needed:
            span = self._spans.best(needed)
            used = span._replace(stop=min(span.stop, span.start + needed))
            if used.stop < span.stop:
                self._spans.give(span._replace(start=used.stop))
            taken.append(used)
            needed -= used.size
        parts = [self._regions[each.region][each.start : each.stop] for each in taken]
        if parts:
            parts[-1] = parts[-1][: nbytes - sum(part.numel() for part in parts[:-1])]
        room = Room(tuple(parts))
        weakref.finalize(room, self._left.extend, taken).atexit = False
        return room

    def close(self) -> None:
        """It is given back, as soon as no room of it is left."""
        self._regions, self._spans, self._left = [], _Spans(), deque()

    def _lack(self, more: int, why: str) -> str:
        all_of_it = sum(region.numel() for region in self._regions)
        beside = f", beside the {size_text(all_of_it)} that are" if all_of_it else ""
        return f"{size_text(more)} of the host's memory are needed, to be pinned{beside}: {why}"


class _Pages(mmap.mmap):
    """Pages of the process's own, which are pinned for as long as they are there."""

    pinned_by: Any = None
    address: int

    def __del__(self) -> None:
        # Weak references to a mapping are told only when it has gone.
        if self.pinned_by is not None:
            with contextlib.suppress(DriverError):  # of a context that is lost
                self.pinned_by.unpin(self.address)


def pinned(nbytes: int, device: str) -> list[Any]:
    """New memory of the host's, as tensors of bytes, from and to which a device copies by itself.

    Args:
        nbytes: How much: some regions.
        device: As torch calls it; where none is in use, nothing is pinned.

    Raises:
        OSError: The host hasn't that much.
        RuntimeError: Nor does torch get it.
    """
    if in_use(device) is None:
        return [_memory(nbytes)[1]]
    found = driver(device)
    memory = None if found is None else _by_driver(nbytes, found)
    return _by_torch(nbytes) if memory is None else [memory]


def _by_driver(nbytes: int, found: Any) -> Any:
    """None where it can't, as in some virtual machines: nothing is left of it then."""
    pages, memory = _memory(nbytes)
    _touch(memory)
    try:
        found.pin(memory.data_ptr(), nbytes)
    except DriverError:
        return None
    pages.pinned_by, pages.address = found, memory.data_ptr()
    return memory


def _by_torch(nbytes: int) -> list[Any]:
    """It pins powers of two: of 33 GiB in one piece 64."""
    torch, regions = imported("torch"), []
    while nbytes:
        regions.append(torch.empty(1 << (nbytes.bit_length() - 1), dtype=torch.uint8, pin_memory=True))
        nbytes -= regions[-1].numel()
    return regions


def _memory(nbytes: int) -> tuple[_Pages, Any]:
    torch = imported("torch")
    pages = _Pages(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    # A process that is forked has zeros there: else the device might copy from pages that are the other one's. It has
    # the addresses, too, as it may collect what lies there.
    try:
        pages.madvise(_WIPE_ON_FORK)
    except OSError:  # gVisor
        pages.madvise(mmap.MADV_DONTFORK)
    return pages, torch.frombuffer(pages, dtype=torch.uint8)


def _touch(memory: Any) -> None:
    """Have all pages be there."""
    parts = memory.split(_TOUCHED_BYTES)  # torch itself has several threads for larger ones
    by_threads(lambda part: part[:: mmap.PAGESIZE].zero_(), parts, _THREADS)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN
