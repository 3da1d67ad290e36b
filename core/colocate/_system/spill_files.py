"""A file that pages of this process go to, and memory that they come back in: what the kernel is asked for either."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from colocate._system.libc import check, libc
from colocate._system.mappings import PAGE, Area, FileId, Place, mapping_at, written_in

LARGE_PAGE = 2 << 20
MAP_FIXED = 0x10

_AT_ONCE_BYTES = 1 << 30  # a single write is at most 2 GiB
_FAILED = ctypes.c_void_p(-1).value
_MOVES_TO = 0x01 | 0x02  # MREMAP_MAYMOVE | MREMAP_FIXED
_HUGEPAGE = 14  # MADV_HUGEPAGE
_PUNCHES = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, with FALLOC_FL_KEEP_SIZE


class SpillFile:
    """One of them.

    Attributes:
        descriptor: Its, as long as it is open.
        id: What the kernel calls it where it is mapped.
        size: How much of it is given to somebody.
    """

    def __init__(self, directory: Path) -> None:
        """Make it.

        Raises:
            OSError: It can't be made there, or the kernel doesn't show where it is mapped.
        """
        self.descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            self.id = _shown(self.descriptor, directory)
        except OSError:
            os.close(self.descriptor)
            raise
        self.size = 0

    def close(self) -> None:
        os.close(self.descriptor)

    def room(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512

    def reserve(self, size: int) -> None:
        """Have room for so much more on the disk."""
        if size:
            os.posix_fallocate(self.descriptor, self.size, size)

    def cut(self) -> None:
        """Have no room for more than is given to somebody."""
        os.ftruncate(self.descriptor, self.size)

    def free_all_but(self, places: Sequence[Place]) -> None:
        """Free what has no place in it any more, as its memory was freed."""
        at = 0
        for place in sorted(places, key=lambda each: each.offset):
            if at < place.offset:
                self._punch(at, place.offset - at)
            at = max(at, place.offset + place.stop - place.start)
        if at < self.size:
            self.size = at
            self.cut()

    def tells_written(self) -> bool:
        """Whether what isn't written into is told as pages of it. It isn't where the disk is memory (DAX)."""
        if not self.size:
            return True
        with _first_page(self.descriptor) as page:
            ctypes.c_char.from_address(page.start).value  # noqa: B018 - it is there then
            return next(written_in(page), None) is None

    def free(self, place: Place) -> None:
        """Free a place; memory that is mapped there keeps what somebody has written into it, and loses all else."""
        self._punch(place.offset, place.stop - place.start)

    def _punch(self, offset: int, size: int) -> None:
        check(libc().fallocate(self.descriptor, _PUNCHES, offset, size))

    def read(self, start: int, stop: int, offset: int) -> None:
        while start < stop:
            size = min(stop - start, _AT_ONCE_BYTES)
            done = os.preadv(self.descriptor, [(ctypes.c_char * size).from_address(start)], offset)
            if not done:
                raise OSError(errno.EIO, "the file is shorter than what was put there")
            start, offset = start + done, offset + done

    def write(self, place: Place) -> None:
        start, offset = place.start, place.offset
        while start < place.stop:
            size = min(place.stop - start, _AT_ONCE_BYTES)
            done = os.pwrite(self.descriptor, (ctypes.c_char * size).from_address(start), offset)
            start, offset = start + done, offset + done

    def replace(self, place: Place) -> None:
        """Have memory be what the file has."""
        size, protection = place.stop - place.start, mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | MAP_FIXED
        if libc().mmap(place.start, size, protection, flags, self.descriptor, place.offset) != place.start:
            check(-1)


def _shown(file: int, directory: Path) -> FileId:
    """What the kernel calls a file where it is mapped: that can't be told from the file itself."""
    with _first_page(file) as page:
        found = mapping_at(page.start)
    if found is None or not found.file[1]:
        raise OSError(
            errno.EOPNOTSUPP,
            f"/proc/self/maps doesn't show where files of {directory} are mapped: put memory away elsewhere",
        )
    return found.file


@contextlib.contextmanager
def _first_page(file: int) -> Iterator[Area]:
    """It, mapped."""
    address = libc().mmap(None, PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE, file, 0)
    if address == _FAILED:
        check(-1)
    try:
        yield Area(address, address + PAGE)
    finally:
        libc().munmap(address, PAGE)


class Copy:
    """Memory of this process's own that pages are read into, and that is moved into their place then.

    Attributes:
        area: The pages.
    """

    def __init__(self, area: Area) -> None:
        """Map it.

        Raises:
            OSError: There is no memory for it.
        """
        self.area = area
        self._start = _like(area.start, area.stop - area.start)
        self._moved = False

    def close(self) -> None:
        if not self._moved:
            libc().munmap(self._start, self.area.stop - self.area.start)

    def read(self, file: SpillFile, place: Place) -> None:
        """Read what some of the pages hold."""
        ahead = self._start - self.area.start
        file.read(place.start + ahead, place.stop + ahead, place.offset)

    def move(self) -> None:
        """In one step: who reads the pages meanwhile, by accident, finds them there or here."""
        size = self.area.stop - self.area.start
        if libc().mremap(self._start, size, size, _MOVES_TO, self.area.start) != self.area.start:
            check(-1)
        self._moved = True


def _like(address: int, size: int) -> int:
    """Memory that can be moved there: large pages begin in it where they do there."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    got = libc().mmap(None, size + LARGE_PAGE, protection, flags, -1, 0)
    if got == _FAILED:
        check(-1)
    before = (address - got) % LARGE_PAGE
    if before:
        libc().munmap(got, before)
    libc().munmap(got + before + size, LARGE_PAGE - before)
    libc().madvise(got + before, size, _HUGEPAGE)  # a kernel may have none
    return int(got + before)


def file_system(directory: Path) -> str:
    """The type of the file system that a directory lies on."""
    path = directory.resolve(strict=True)
    kind, longest = "", -1
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mounted, name, *_ = line.split(" ")
        place = Path(mounted.encode().decode("unicode_escape"))
        if path.is_relative_to(place) and len(place.parts) >= longest:
            kind, longest = name, len(place.parts)
    return kind
