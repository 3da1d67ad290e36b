"""What lies where in this process's memory: the kernel's tables."""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

PAGE = mmap.PAGESIZE
# Each piece may cost the kernel two mappings, of which a process may have some ten thousands: when those run short,
# only larger pieces are worth it.
_LEAST_BYTES = PAGE, 4 * PAGE, 16 * PAGE
_LOOKED_AT_PAGES = 1 << 16
# Bits 63, 62 and 61 of an entry of pagemap, in its last byte.
_IN_MEMORY, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
# A page of a file that the kernel is moving elsewhere in memory is told as swapped, and of a file.
_WRITTEN = bytes(bool(b & (_IN_MEMORY | _SWAPPED)) and not b & _OF_FILE for b in range(256))
_PRESENT = bytes(bool(b & _IN_MEMORY) for b in range(256))

FileId: TypeAlias = tuple[str, int, str]
"""A file's device and inode, as they are told of mappings, and its name; ("00:00", 0, "") is none.

`fstat` tells another device on btrfs and on overlays, and subvolumes of btrfs, each of which numbers its files by
itself, have one device here: hence the name.
"""

_NO_FILE: FileId = ("00:00", 0, "")


class Area(NamedTuple):
    """Whole pages of this process's memory, from an address to before another one."""

    start: int
    stop: int


def size_of(areas: Iterable[Area]) -> int:
    """Their bytes."""
    return sum(area.stop - area.start for area in areas)


class Mapping(NamedTuple):
    """A line of `/proc/self/maps`."""

    start: int
    stop: int
    ours_to_replace: bool  # private, readable and writable
    file: FileId
    offset: int

    @property
    def is_of_file(self) -> bool:
        """Whether its pages are a file's, or were."""
        return self.file != _NO_FILE


class Place(NamedTuple):
    """Pages that have a place in a file, or get one.

    Attributes:
        start: Where they begin in memory.
        stop: Where they end.
        file: Which file it is.
        offset: Where they begin in it.
    """

    start: int
    stop: int
    file: int
    offset: int

    def of(self, area: Area) -> Place:
        """That of some of the pages."""
        return Place(area.start, area.stop, self.file, self.offset + area.start - self.start)


_REMEMBERED = 1 << 14
_last: dict[str, Mapping] = {}  # the lines of the last look: most are the same at the next one

_Span = TypeVar("_Span", Mapping, Place, Area)


def own(pieces: Iterable[tuple[int, int]], mappings: Sequence[Mapping]) -> Iterator[tuple[int, int]]:
    """Those pieces of memory, by addresses and sizes, that are this process's alone, and that it may write into."""
    starts = [each.start for each in mappings]
    for start, size in pieces:
        if _is_own(Area(start, start + size), mappings, starts):
            yield start, size


def areas_of(pieces: Iterable[tuple[int, int]], mappings: Sequence[Mapping] | None = None) -> list[Area]:
    """The pages that can be put away.

    Args:
        pieces: Addresses and sizes of what lies in memory, in bytes. Pages that hold something else besides stay, and
            so does memory that processes share, and what can't be written; and, when the process would have half of the
            mappings that the system allows, what is small, but for what is in a file by now.
        mappings: What lies where, if that was just asked.

    Returns:
        Areas that don't overlap, in order.
    """
    if not (found := whole_pages(pieces)):
        return []
    if mappings is None:
        mappings = mappings_now()
    found = _worth_it(found, mappings)
    # Pages of one piece may lie beside those of another one that processes share.
    ours = split(found, [each for each in mappings if each.ours_to_replace])[0]
    return whole_pages((area.start, area.stop - area.start) for area, _ in ours)


def without_areas(pieces: Sequence[tuple[int, int]], mappings: Sequence[Mapping]) -> list[int]:
    """The addresses of pieces that are large enough to be put away, but for there being so many; see `areas_of`."""
    found = whole_pages(pieces)
    small = sorted(set(found).difference(_worth_it(found, mappings)))
    starts = [area.start for area in small]

    def is_small(piece: Area) -> bool:
        at = bisect.bisect_left(starts, piece.stop) - 1  # the last one that begins before it ends
        return at >= 0 and small[at].stop > piece.start

    return [start for start, size in pieces if size >= PAGE and is_small(Area(start, start + size))] if small else []


def _worth_it(areas: Sequence[Area], mappings: Sequence[Mapping]) -> list[Area]:
    """Those that are worth the mappings which they may cost.

    The process isn't to have half of those that the system allows. What is in a file has one.
    """
    most = most_mappings() // 2 - len(mappings)
    if 2 * len(areas) <= most:
        return list(areas)
    starts = [area.start for area in areas]
    anew = split(areas, [each for each in mappings if each.is_of_file])[1]
    costs = Counter(areas[bisect.bisect_right(starts, each.start) - 1] for each in anew)
    found = list(areas)
    for least in _LEAST_BYTES:
        found = [area for area in found if area.stop - area.start >= least or area not in costs]
        if 2 * sum(costs[area] for area in found) <= most:
            break
    return found


def whole_pages(pieces: Iterable[tuple[int, int]]) -> list[Area]:
    """The pages in which nothing but these pieces lies."""
    areas = (Area(-(-start // PAGE) * PAGE, stop // PAGE * PAGE) for start, stop in merged(pieces))
    return [area for area in areas if area.stop > area.start]


def _is_own(area: Area, mappings: Sequence[Mapping], starts: Sequence[int]) -> bool:
    at = area.start
    for index in range(max(0, bisect.bisect_right(starts, at) - 1), len(mappings)):
        each = mappings[index]
        if each.start > at or at >= area.stop:
            break
        at = max(at, each.stop if each.ours_to_replace else at)
    return at >= area.stop


def split(areas: Iterable[Area], spans: Sequence[_Span]) -> tuple[list[tuple[Area, _Span]], list[Area]]:
    """What of areas lies in one of these spans, which are in order and don't overlap, and what in none."""
    starts = [each.start for each in spans]
    found: list[tuple[Area, _Span]] = []
    others: list[Area] = []
    for area in areas:
        at = area.start
        for index in range(max(0, bisect.bisect_right(starts, at) - 1), len(spans)):
            span = spans[index]
            if span.stop <= at:
                continue
            if span.start >= area.stop:
                break
            if at < span.start:
                others.append(Area(at, span.start))
                at = span.start
            stop = min(span.stop, area.stop)
            found.append((Area(at, stop), span))
            at = stop
        if at < area.stop:
            others.append(Area(at, area.stop))
    return found, others


def joined(places: Iterable[Place]) -> list[Place]:
    """In order, with those in one that overlap or touch, where their places do, too."""
    done: list[Place] = []
    for place in sorted(places):
        last = done[-1] if done else None
        if last and place.start <= last.stop and last.of(Area(place.start, place.stop)) == place:
            done[-1] = last._replace(stop=max(last.stop, place.stop))
        else:
            done.append(place)
    return done


def written_in(area: Area) -> Iterator[Area]:
    """The stretches of pages of a private mapping of a file that somebody has written into."""
    for at, told in _pages(area):
        for found in re.finditer(b"\1+", told.translate(_WRITTEN)):
            yield Area(at + found.start() * PAGE, at + found.end() * PAGE)


def present_in(area: Area) -> int:
    """Bytes of the pages, from the one in which an area begins to the one in which it ends, that are in memory."""
    whole = Area(area.start // PAGE * PAGE, -(-area.stop // PAGE) * PAGE)
    return PAGE * sum(told.translate(_PRESENT).count(1) for _, told in _pages(whole))


def _pages(area: Area) -> Iterator[tuple[int, bytes]]:
    """What the kernel tells of pages, a byte for each, and where the first of these is; many at a time."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for at in range(area.start, area.stop, _LOOKED_AT_PAGES * PAGE):
            count = min(_LOOKED_AT_PAGES, (area.stop - at) // PAGE)
            # Of each page eight bytes, of which the last one tells what is asked here.
            yield at, os.pread(file.fileno(), count * 8, at // PAGE * 8)[7::8]


def merged(pieces: Iterable[tuple[int, int]]) -> list[Area]:
    """From where to where pieces go, by addresses and sizes: with those in one that overlap or touch."""
    found: list[Area] = []
    for start, size in sorted(pieces):
        if found and start <= found[-1].stop:
            found[-1] = Area(found[-1].start, max(found[-1].stop, start + size))
        else:
            found.append(Area(start, start + size))
    return found


def mappings_now() -> list[Mapping]:
    """All of this process's, in order."""
    global _last
    known = _last
    found = {line: known.get(line) or mapping(line) for line in _lines("maps")}
    _last = found if len(found) <= _REMEMBERED else {}
    return [*found.values()]


def mapping_at(address: int) -> Mapping | None:
    """The one in which an address lies; None where the kernel shows none."""
    return next((each for each in mappings_now() if each.start <= address < each.stop), None)


class OfFile(NamedTuple):
    """What of a mapping of a file counts, in bytes.

    Attributes:
        size: How many bytes of it do.
        there: How many of these are in memory, at most.
        pages: How many of these are pages of the file: nobody has written into them since, or they are shared.
    """

    size: int
    there: int
    pages: int


def of_files(most: Callable[[Mapping], int]) -> dict[Mapping, OfFile]:
    """What of this process's mappings of files counts.

    Args:
        most: How many bytes of a mapping do at most.
    """
    counting = {each.start: (each, most(each)) for each in mappings_now() if each.is_of_file}
    counting = {start: found for start, found in counting.items() if found[1] > 0}
    if not counting:  # else the kernel looks at each page of the process
        return {}
    told: dict[int, dict[str, int]] = {start: {"Rss:": 0, "Anonymous:": 0} for start in counting}
    start = 0
    for line in _lines("smaps"):
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start = mapping(line).start
        elif start in counting and name in ("Rss:", "Anonymous:"):
            told[start][name] = int(rest.split()[0]) * 1024
    return {
        each: OfFile(size, min(size, told[start]["Rss:"]), min(size, told[start]["Rss:"] - told[start]["Anonymous:"]))
        for start, (each, size) in counting.items()
    }


def pages_of_files(most: Callable[[Mapping], int]) -> int:
    """Bytes of this process's memory that are pages of files; see `of_files`."""
    return sum(each.pages for each in of_files(most).values())


def most_mappings() -> int:
    """How many the system allows a process to have."""
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def refuse_too_many(number: int) -> None:
    """Raise when the process would have more mappings than it may.

    Raises:
        OSError: It would.
    """
    if number > most_mappings():
        raise OSError(
            errno.ENOMEM,
            f"the process would have more memory mappings than the system allows (vm.max_map_count, {most_mappings()})",
        )


def mapping(line: str) -> Mapping:
    """What a line of `/proc/self/maps`, or the first one of an entry of `/proc/self/smaps`, tells."""
    where, access, offset, device, inode, *path = line.split(maxsplit=5)
    start, _, stop = where.partition("-")
    private = access.startswith("rw") and access[3] == "p"
    number = int(inode)
    name = path[0].rpartition("/")[2].rstrip() if path and number else ""
    return Mapping(int(start, 16), int(stop, 16), private, (device, number, name), int(offset, 16))


def _lines(table: str) -> list[str]:
    # Not as text, nor by `splitlines`: a name may have what these take for the end of a line.
    return Path("/proc/self", table).read_bytes().decode(errors="replace").rstrip("\n").split("\n")
