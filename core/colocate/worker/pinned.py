"""Pinned memory of the host, to which a device's goes as it sleeps: it grows to what sleeps at once, and is kept.

Torch pins powers of two, one page after the other. Here several threads touch the pages first, which are huge ones
where the kernel has such: that takes a fifth of the time (docs/gpu.md).
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import attrs

from colocate._definitions.cuda_driver import DriverError, driver
from colocate._system.imported import imported
from colocate._system.room import free_memory
from colocate._system.sizes import size_text
from colocate.gpus import in_use

GRAIN = 512  # bytes: where pieces may begin
_REGION_BYTES = 2 << 20  # a huge page
_THREADS = 8


class _Span(NamedTuple):
    """Bytes of a region that are nobody's."""

    region: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


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
        self._spans: list[_Span] = []  # sorted; none begins where another one ends
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
        self._gather()
        more = sum(map(_rounded, sizes)) - sum(span.size for span in self._spans)
        if more <= 0:
            return
        more = -(-more // _REGION_BYTES) * _REGION_BYTES
        if more > (free := self._free_on_host()):
            raise MemoryError(
                f"{size_text(more)} of the host's memory are needed, to be pinned; {size_text(free)} are free"
            )
        try:
            regions = pinned(more, self._device)
        except (OSError, RuntimeError) as error:
            raise MemoryError(f"{size_text(more)} of pinned memory are needed: {error}") from error
        for region in regions:
            self._give(_Span(len(self._regions), 0, region.numel()))
            self._regions.append(region)

    def take(self, nbytes: int) -> Room:
        """Some of what was reserved."""
        taken, needed = [], _rounded(nbytes)
        while needed:
            span = self._best(needed)
            self._spans.remove(span)
            used = span._replace(stop=min(span.stop, span.start + needed))
            if used.stop < span.stop:
                bisect.insort(self._spans, span._replace(start=used.stop))
            taken.append(used)
            needed -= used.size
        parts = [self._regions[each.region][each.start : each.stop] for each in taken]
        if parts:
            parts[-1] = parts[-1][: nbytes - sum(part.numel() for part in parts[:-1])]
        room = Room(tuple(parts))
        weakref.finalize(room, self._left.extend, taken).atexit = False
        return room

    def _best(self, nbytes: int) -> _Span:
        """The smallest that has room for so much; else the largest, for some of it."""
        enough = [span for span in self._spans if span.size >= nbytes]
        return min(enough, key=lambda span: span.size) if enough else max(self._spans, key=lambda span: span.size)

    def _gather(self) -> None:
        while self._left:
            self._give(self._left.popleft())

    def _give(self, span: _Span) -> None:
        """It is nobody's, and so one with those beside it that are nobody's."""
        at = bisect.bisect(self._spans, span)
        if at < len(self._spans) and self._spans[at][:2] == (span.region, span.stop):
            span = span._replace(stop=self._spans.pop(at).stop)
        if at and (self._spans[at - 1].region, self._spans[at - 1].stop) == (span.region, span.start):
            span = span._replace(start=self._spans.pop(at - 1).start)
            at -= 1
        self._spans.insert(at, span)


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
    if (found := driver(device)) is None:
        return _by_torch(nbytes)
    pages, memory = _memory(nbytes)
    _touch(memory)
    try:
        found.pin(memory.data_ptr(), nbytes)
    except DriverError:  # some virtual machines can't
        return _by_torch(nbytes)
    pages.pinned_by, pages.address = found, memory.data_ptr()
    return [memory]


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
    pages.madvise(mmap.MADV_DONTFORK)  # else after a fork the device may copy from pages that the child has
    return pages, torch.frombuffer(pages, dtype=torch.uint8)


def _touch(memory: Any) -> None:
    """Have all pages be there."""
    parts = list(_chunks(memory))
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as threads:
        list(threads.map(lambda part: part[:: mmap.PAGESIZE].zero_(), parts))


def _chunks(memory: Any) -> Iterator[Any]:
    chunk = max(_REGION_BYTES, -(-memory.numel() // (8 * _THREADS * _REGION_BYTES)) * _REGION_BYTES)
    yield from memory.split(chunk)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN
