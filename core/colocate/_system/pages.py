"""Memory of this process that goes to a file and comes back, in place.

Pages are put away and never moved, so everything that refers to them by their addresses stays right: tensors, views,
NumPy arrays, C code. They become a private mapping of the file. While they are away nothing of them is in memory;
whoever reads them all the same gets from the file what was there, and whoever writes gets a page of its own, as ever.

They come back in one of two ways. By being read: they stay pages of the file, so what nobody has written into since is
put away again at no cost, but the kernel copies each page that is written into by itself, which takes several times as
long as to copy all of them at once. Or that is done beforehand, where they are to be written into: they are copied into
memory of the process's own, in large pages, which are also given back faster.

What lies where is asked of the kernel each time (`/proc/self/maps`, `/proc/self/pagemap`): memory that was freed
meanwhile, and given to somebody else, is taken for what it is now. Only for what was copied back it is noted which
place in the file it has, to be written there again.

Linux only. Memory must come from the C library's `malloc`, or from `mmap`: other allocators may take pages that they
have given back for zeros.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import functools
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

PAGE = mmap.PAGESIZE
_LEAST_BYTES = 16 * PAGE  # each piece may cost the kernel two mappings, of which a process has some ten thousands
_AT_ONCE_BYTES = 1 << 30  # a single write is at most 2 GiB
_LOOKED_AT_PAGES = 1 << 16

_LARGE_PAGE = 2 << 20
_PIECE_BYTES = 16 * _LARGE_PAGE
_THREADS = 4
_LEAST_COPIED_BYTES = 2 * _LARGE_PAGE  # then there is a whole one in it, wherever it begins

_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MOVES_TO = 0x01 | 0x02  # MREMAP_MAYMOVE | MREMAP_FIXED
_HUGEPAGE = 14  # MADV_HUGEPAGE
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_PUNCHES = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, with FALLOC_FL_KEEP_SIZE
# Bits 63, 62 and 61 of an entry of pagemap, in its last byte.
_IN_MEMORY, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
_WRITTEN = bytes(bool(b & _SWAPPED) or b & (_IN_MEMORY | _OF_FILE) == _IN_MEMORY for b in range(256))
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


class Area(NamedTuple):
    """Whole pages of this process's memory, from an address to before another one."""

    start: int
    stop: int


class _Mapping(NamedTuple):
    """A line of `/proc/self/maps`."""

    start: int
    stop: int
    ours_to_replace: bool  # private, readable and writable
    file: tuple[str, int]  # device and inode; of no file ("00:00", 0)
    offset: int


class _Part(NamedTuple):
    """Pages that have a place in the file, or get one."""

    start: int
    stop: int
    offset: int
    new: bool  # their place was given to them just now


_Place: TypeAlias = "_Mapping | _Part"


class SpillFile:
    """A file without a name, to which pages of this process go. It ends with the process, also by SIGKILL."""

    def __init__(self, directory: Path) -> None:
        """Make it.

        Args:
            directory: Where its bytes lie: on a disk.

        Raises:
            OSError: There is no such directory, or no file can be made there.
            ValueError: Files there are in memory themselves, or the memory isn't from the C library's `malloc`.
        """
        if (kind := _file_system(directory)) in _MEMORY_FILE_SYSTEMS:
            raise ValueError(f"{directory} is a {kind}: what is put there stays in memory")
        if (allocator := _foreign_allocator()) is not None:
            raise ValueError(f"memory comes from {allocator}, which may take pages that were put away for empty ones")
        self._file = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        status = os.fstat(self._file)
        self._id = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino
        self._size = 0
        self._places: list[_Part] = []  # of memory that was copied back

    def close(self) -> None:
        """Nothing more is put away there. Its bytes are freed when no page refers to them any more."""
        os.close(self._file)

    def in_memory(self) -> int:
        """Bytes of this process's memory that are pages of the file, as nobody has written into them since."""
        size, own = 0, False
        for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                own = _mapping(line).file == self._id
            elif own and name in ("Rss:", "Anonymous:"):
                size += int(rest.split()[0]) * (1024 if name == "Rss:" else -1024)
        return size

    def write(self, areas: Sequence[Area]) -> Written:
        """Write pages into the file; they stay in memory until `Written.put_away`.

        Args:
            areas: The pages; from `areas_of`.

        Raises:
            OSError: There is no room, on the disk or in the kernel's tables: nothing has changed.
        """
        mappings = _mappings()
        parts = list(self._parts(areas, mappings))
        limit = _most_mappings()
        if len(mappings) + 2 * len(parts) > limit:
            raise OSError(
                errno.ENOMEM,
                f"the process would have more memory mappings than the system allows (vm.max_map_count, {limit})",
            )
        for part in parts:
            for start, stop in ((part.start, part.stop),) if part.new else _written_in(part):
                self._write(start, stop, part.offset + start - part.start)
        return Written(self._file, parts)

    def bring_back(self, areas: Sequence[Area], copied: Sequence[Area] = ()) -> None:
        """Have pages be in memory, as far as they are in the file.

        Args:
            areas: The pages.
            copied: Those of them that are to be written into afterwards, and that nobody writes into meanwhile.

        Raises:
            OSError: There is no memory for them. They hold what they held, wherever that is.
        """
        parts = _split(copied, self._homes(_mappings()))[0]
        pieces = [piece for part in parts if part.stop - part.start >= _LEAST_COPIED_BYTES for piece in _pieces(part)]
        if pieces:
            from concurrent.futures import ThreadPoolExecutor  # takes a while, and few workers put anything away

            # The kernel clears the memory first, which takes as long as to copy into it: both on several CPUs.
            threads = min(_THREADS, len(os.sched_getaffinity(0)), len(pieces))
            with ThreadPoolExecutor(threads, "colocate-pages") as pool:
                done = [pool.submit(self._copy_back, piece) for piece in pieces]
            moved = [piece for piece, each in zip(pieces, done, strict=True) if not each.exception() and each.result()]
            self._places = _joined([*self._places, *moved])
            for each in done:
                each.result()
        for area in areas:
            if _libc().madvise(area.start, area.stop - area.start, _POPULATE_READ):
                if ctypes.get_errno() != errno.EINVAL:
                    _check(-1)
                for page in range(area.start, area.stop, PAGE):  # an older kernel
                    ctypes.c_char.from_address(page).value  # noqa: B018 - reading it is what this is for

    def _copy_back(self, part: _Part) -> bool:
        """Copy pages into memory of the process's own and move that into their place; whether it has come to that."""
        size = part.stop - part.start
        copy, moved = _like(part.start, size), False
        try:
            self._read(copy, copy + size, part.offset)
            # Whoever has written into it while it was away has pages there that aren't in the file.
            if next(_written_in(part), None) is None:
                # In one step: who reads it meanwhile, by accident, finds it there or here.
                if _libc().mremap(copy, size, size, _MOVES_TO, part.start) != part.start:
                    _check(-1)
                moved = True
        finally:
            if not moved:
                _libc().munmap(copy, size)
        return moved

    def _parts(self, areas: Sequence[Area], mappings: Sequence[_Mapping]) -> Iterator[_Part]:
        """Where in the file the pages are, or will be; room for what is new is there from now on."""
        homes = self._homes(mappings)
        self._places = [part for part in self._places if _split([Area(part.start, part.stop)], mappings)[0]]
        in_file, others = _split(areas, homes)
        yield from in_file
        copied, new = _split(others, self._places)
        yield from (part._replace(new=True) for part in copied)
        self._free_all_but([*homes, *self._places])
        size = sum(area.stop - area.start for area in new)
        if size:
            os.posix_fallocate(self._file, self._size, size)
        for area in new:
            yield _Part(area.start, area.stop, self._size, new=True)
            self._size += area.stop - area.start

    def _homes(self, mappings: Sequence[_Mapping]) -> list[_Mapping]:
        return [each for each in mappings if each.file == self._id]

    def _free_all_but(self, places: Sequence[_Place]) -> None:
        """Free the places whose memory was freed."""
        at = 0
        for place in sorted(places, key=lambda each: each.offset):
            if at < place.offset:
                _check(_libc().fallocate(self._file, _PUNCHES, at, place.offset - at))
            at = max(at, place.offset + place.stop - place.start)
        if at < self._size:
            os.ftruncate(self._file, at)
            self._size = at

    def _read(self, start: int, stop: int, offset: int) -> None:
        while start < stop:
            size = min(stop - start, _AT_ONCE_BYTES)
            done = os.preadv(self._file, [(ctypes.c_char * size).from_address(start)], offset)
            if not done:
                raise OSError(errno.EIO, "the file is shorter than what was put there")
            start, offset = start + done, offset + done

    def _write(self, start: int, stop: int, offset: int) -> None:
        while start < stop:
            size = min(stop - start, _AT_ONCE_BYTES)
            done = os.pwrite(self._file, (ctypes.c_char * size).from_address(start), offset)
            start, offset = start + done, offset + done


class Written:
    """Pages whose contents are in the file, too."""

    def __init__(self, file: int, parts: Sequence[_Part]) -> None:
        self._file = file
        self._parts = parts

    def put_away(self) -> None:
        """Have them be in the file only. Nobody may have written into them since they were written there."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        for start, stop, offset, _ in self._parts:
            flags = mmap.MAP_PRIVATE | _MAP_FIXED
            if _libc().mmap(start, stop - start, protection, flags, self._file, offset) != start:
                _check(-1)


def areas_of(pieces: Iterable[tuple[int, int]]) -> list[Area]:
    """The pages that can be put away.

    Args:
        pieces: Addresses and sizes of what lies in memory, in bytes. Pages that hold something else besides stay, and
            so do small pieces, memory that processes share, and what can't be written.

    Returns:
        Areas that don't overlap, in order.
    """
    mappings = _mappings()
    starts = [each.start for each in mappings]
    found: list[Area] = []
    for start, stop in _merged(pieces):
        first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
        if last - first < _LEAST_BYTES:
            continue
        at = first
        for mapping in mappings[max(0, bisect.bisect_right(starts, first) - 1) :]:
            if mapping.start > at or at >= last:
                break
            at = max(at, mapping.stop if mapping.ours_to_replace else at)
        if at >= last:
            found.append(Area(first, last))
    return found


def _split(areas: Sequence[Area], places: Sequence[_Place]) -> tuple[list[_Part], list[Area]]:
    """What of areas has one of these places, which are in order, and what has none."""
    starts = [each.start for each in places]
    found: list[_Part] = []
    others: list[Area] = []
    for area in areas:
        at = area.start
        for place in places[max(0, bisect.bisect_right(starts, at) - 1) :]:
            if place.stop <= at:
                continue
            if place.start >= area.stop:
                break
            if at < place.start:
                others.append(Area(at, place.start))
                at = place.start
            stop = min(place.stop, area.stop)
            found.append(_Part(at, stop, place.offset + at - place.start, new=False))
            at = stop
        if at < area.stop:
            others.append(Area(at, area.stop))
    return found, others


def _pieces(part: _Part) -> Iterator[_Part]:
    """It in pieces for several threads; each but the first begins with a large page."""
    at = part.start
    while at < part.stop:
        stop = min(part.stop, (at // _PIECE_BYTES + 1) * _PIECE_BYTES)
        if part.stop - stop < _LEAST_COPIED_BYTES:
            stop = part.stop
        yield part._replace(start=at, stop=stop, offset=part.offset + at - part.start)
        at = stop


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    """In order, with those in one that overlap or touch, where their places do, too."""
    joined: list[_Part] = []
    for part in sorted(parts):
        last = joined[-1] if joined else None
        if last and part.start <= last.stop and part.start - last.start == part.offset - last.offset:
            joined[-1] = last._replace(stop=max(last.stop, part.stop))
        else:
            joined.append(part)
    return joined


def _like(address: int, size: int) -> int:
    """Memory that can be moved there: large pages begin in it where they do there."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    got = _libc().mmap(None, size + _LARGE_PAGE, protection, flags, -1, 0)
    if got == _FAILED:
        _check(-1)
    before = (address - got) % _LARGE_PAGE
    if before:
        _libc().munmap(got, before)
    _libc().munmap(got + before + size, _LARGE_PAGE - before)
    _libc().madvise(got + before, size, _HUGEPAGE)  # a kernel may have none
    return int(got + before)


def _written_in(part: _Part) -> Iterator[tuple[int, int]]:
    """The stretches of pages of a private mapping of a file that somebody has written into."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for at in range(part.start, part.stop, _LOOKED_AT_PAGES * PAGE):
            count = min(_LOOKED_AT_PAGES, (part.stop - at) // PAGE)
            # Of each page eight bytes, of which the last one tells what is asked here.
            told = os.pread(file.fileno(), count * 8, at // PAGE * 8)[7::8].translate(_WRITTEN)
            for found in re.finditer(b"\1+", told):
                yield at + found.start() * PAGE, at + found.end() * PAGE


def _merged(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """From where to where they go, with those in one that overlap or touch."""
    merged: list[tuple[int, int]] = []
    for start, size in sorted(pieces):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], start + size)
        else:
            merged.append((start, start + size))
    return merged


def _mappings() -> list[_Mapping]:
    return [_mapping(line) for line in Path("/proc/self/maps").read_text(errors="replace").splitlines()]


def _most_mappings() -> int:
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def _mapping(line: str) -> _Mapping:
    where, access, offset, device, inode, *_ = line.split(maxsplit=5)
    start, _, stop = where.partition("-")
    private = access.startswith("rw") and access[3] == "p"
    return _Mapping(int(start, 16), int(stop, 16), private, (device, int(inode)), int(offset, 16))


def _file_system(directory: Path) -> str:
    """The type of the file system that a directory lies on."""
    path = directory.resolve(strict=True)
    kind, longest = "", -1
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mounted, name, *_ = line.split(" ")
        place = Path(mounted.encode().decode("unicode_escape"))
        if path.is_relative_to(place) and len(place.parts) >= longest:
            kind, longest = name, len(place.parts)
    return kind


@functools.cache
def _foreign_allocator() -> str | None:
    """The file of the library that `malloc` is from, when that isn't the C library."""

    class Info(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    library, info = _libc(), Info()
    files = []
    for function in (library.malloc, library.gnu_get_libc_version):
        library.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
        files.append(os.fsdecode(info.file or b"an unknown library"))
    return None if files[0] == files[1] else files[0]


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    library.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
    library.mmap.restype = library.mremap.restype = address
    library.mremap.argtypes = [address, size, size, ctypes.c_int, address]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, ctypes.c_int]
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, offset, offset]
    return library


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
