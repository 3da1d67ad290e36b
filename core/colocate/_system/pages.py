"""Memory of this process that goes to files and comes back, in place.

Pages are put away and never moved, so everything that refers to them by their addresses stays right: tensors, views,
NumPy arrays, C code. They become private mappings of files. While they are away nothing of them is in memory;
whoever reads them all the same gets from there what it was, and whoever writes gets a page of its own, as ever.

They come back in one of two ways. By being read: they stay pages of a file, so what nobody has written into since is
put away again at no cost, but the kernel copies each page that is written into by itself, which takes several times as
long as to copy all of them at once. Or that is done beforehand, where they are to be written into: they are copied into
memory of the process's own, in large pages, which are also given back faster.

What lies where is asked of the kernel each time (`mappings.py`): memory that was freed meanwhile, and given to somebody
else, is taken for what it is now. Only for what was copied back it is noted which place in a file it has, to be written
there again. There are several files, since the kernel lets only one thread at a time write into one.

Places are kept for memory that has come back, so that it goes again at little cost. When the disk is full they are
given up: of what was copied back or written into nobody needs them. What was only read comes from there, and becomes
memory of the process's own before, by the kernel, since somebody may be using it.

A process that is forked has the same pages of the files for its own, and nothing may happen to them: from then on pages
go to new files, of which it has none.

Linux only. Memory must come from the C library's `malloc`, or from `mmap`: other allocators may take pages that they
have given back for zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from colocate._system.by_threads import by_threads
from colocate._system.libc import check, foreign_allocator, libc
from colocate._system.mappings import (
    PAGE,
    Area,
    FileId,
    Mapping,
    Place,
    joined,
    mappings_now,
    merged,
    pages_of_files,
    refuse_too_many,
    size_of,
    split,
    written_in,
)
from colocate._system.room import free_memory, spill_directories
from colocate._system.sizes import size_text
from colocate._system.spill_files import LARGE_PAGE, Copy, SpillFile, file_system

_PIECE_BYTES = 8 * LARGE_PAGE
_READ_BYTES = 4 * LARGE_PAGE
_BATCH_BYTES = 256 * LARGE_PAGE
_THREADS = 4
_LEAST_COPIED_BYTES = 2 * LARGE_PAGE  # then there is a whole one in it, wherever it begins

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of the same
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}

# Workers that are threads of one process may have the same memory, and a file each: who looks what lies where, and goes
# by that, does so before another one puts something else there.
_one_at_a_time = threading.Lock()

_forks = 0  # how often this process was forked


def _count_fork() -> None:
    global _forks
    _forks += 1


def _begin_in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()  # who had it isn't there


# Before, so that who looks sees those that there are; and after, as somebody may have looked in between.
os.register_at_fork(before=_count_fork, after_in_parent=_count_fork, after_in_child=_begin_in_child)


class Spill:
    """Files without names, to which pages of this process go. They end with the process, also by SIGKILL.

    Attributes:
        directory: Where their bytes lie.
        files: Those to which pages go now.
    """

    def __init__(self, directory: Path) -> None:
        """Make them.

        Args:
            directory: Where their bytes lie: on a disk.

        Raises:
            OSError: There is no such directory, or no file can be made there.
            ValueError: Files there are in memory themselves, or the memory isn't from the C library's `malloc`.
        """
        if (kind := file_system(directory)) in _MEMORY_FILE_SYSTEMS:
            raise ValueError(f"{directory} is a {kind}: what is put there stays in memory")
        if (allocator := foreign_allocator()) is not None:
            raise ValueError(f"memory comes from {allocator}, which may take pages that were put away for empty ones")
        free_memory()  # imports what it asks: when that is wanted, there may be no memory left to do so
        self.directory = directory
        self.files: list[SpillFile] = []
        self._former: set[FileId] = set()  # files to which nothing goes any more; pages may be there
        self._old: list[SpillFile] = []  # those of them that are open
        self._pending: weakref.WeakSet[Written] = weakref.WeakSet()  # which may yet be put away
        self._begin()

    @classmethod
    def somewhere(cls, wanted: str | None) -> Spill:
        """Make them in the folder that was named, or in the first of the usual ones where that can be.

        Raises:
            ValueError: There is none.
        """
        reasons = []
        for directory in spill_directories(wanted):
            try:
                return cls(Path(directory))
            except (OSError, ValueError) as error:
                reasons.append(str(error))
        raise ValueError(
            f"memory can't sleep here ({'; '.join(reasons)}): name a folder on a disk as connect(spill_dir=...), in a "
            "config as executor.with.spill_dir"
        )

    def _begin(self) -> None:
        """Have new files.

        Raises:
            OSError: None can be made: nothing has changed.
        """
        files: list[SpillFile] = []
        try:
            for _ in range(min(_THREADS, len(os.sched_getaffinity(0)))):
                files.append(SpillFile(self.directory))
        except OSError:
            for file in files:
                file.close()
            raise
        for file in self.files:  # its bytes are there as long as pages are
            self._former.add(file.id)
        self._old += self.files
        self._close_old()
        self.files = files
        self._ids = {file.id: number for number, file in enumerate(files)}
        self._back: list[Place] = []  # of memory that was copied back
        self._awake: list[Area] = []  # was brought back since it was last put away; it may be pages of the files
        self._forks = _forks

    def _close_old(self) -> None:
        """Close files to which nothing goes any more, but for what was written and is about to go."""
        used = {file for each in self._pending for file in each.files}
        for file in self._old:
            if file not in used:
                file.close()
        self._old = [file for file in self._old if file in used]

    @property
    def _has_heirs(self) -> bool:
        """Whether a process may have been forked that has pages of the files."""
        return self._forks != _forks and any(file.size for file in self.files)

    def close(self) -> None:
        """Nothing more is put away there. Its bytes are freed when no page refers to them any more."""
        for file in [*self._old, *self.files]:
            file.close()

    def is_in_use(self) -> bool:
        """Free all that isn't, once nobody puts anything there; whether there are pages in the files."""
        with _one_at_a_time:
            self._back = []
            mappings = mappings_now()
            if not self._has_heirs:
                with contextlib.suppress(OSError):  # it is tried again when something is written there
                    self._free_unused(mappings)
            return bool(self._homes(mappings))

    @property
    def descriptors(self) -> list[int]:
        """Those of the files that are open."""
        return [file.descriptor for file in [*self._old, *self.files]]

    def room(self) -> int:
        """Bytes that the files take on the disk."""
        return sum(file.room() for file in self.files)

    def owns(self, each: Mapping) -> bool:
        """Whether a mapping is one of the files, or was."""
        return each.file in self._ids or each.file in self._former

    def in_memory(self) -> int:
        """Bytes of this process's memory that are pages of the files, as nobody has written into them since."""
        return pages_of_files(lambda each: each.stop - each.start if self.owns(each) else 0)

    def write(self, areas: Sequence[Area]) -> Written:
        """Write pages into the files; they stay in memory until `Written.put_away`.

        Args:
            areas: The pages; from `areas_of`.

        Raises:
            OSError: There is no room, on the disk or in the kernel's tables: nothing has changed.
        """
        with _one_at_a_time:
            for give_up in (self._give_up_places, self._give_up_copies):
                try:
                    return self._write(areas)
                except OSError as error:
                    if error.errno not in _FULL:
                        raise
                give_up(areas)
            try:
                return self._write(areas)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                why = str(error.strerror)
                if error.errno == errno.EFBIG:
                    why += ", as the limit of this process has it (ulimit -f)"
                raise OSError(error.errno, self._lack(areas, why)) from error

    def _lack(self, areas: Iterable[Area], why: str) -> str:
        size = size_text(size_of(areas))
        text = f"{why}: {size} are to sleep in {self.directory} (spill_dir)"
        with contextlib.suppress(OSError):  # the folder isn't there any more, of which the files have no need
            disk = os.statvfs(self.directory)
            text += f", on whose disk {size_text(disk.f_bavail * disk.f_frsize)} are free"
        return text

    def _write(self, areas: Sequence[Area]) -> Written:
        if self._has_heirs:
            try:
                self._begin()
            except OSError as error:
                why = f"{error.strerror}: since a process was forked, what sleeps needs new files in {self.directory}"
                raise OSError(error.errno, f"{why} (spill_dir)") from error
        self._close_old()
        mappings = mappings_now()
        there, without = split(areas, self._homes(mappings))
        known = [home.of(area) for area, home in there]
        new = self._placed(without, mappings)
        refuse_too_many(len(mappings) + 2 * len(known + new))

        def write(number: int) -> None:
            file = self.files[number]
            for place in new:
                if place.file == number:
                    file.write(place)
            for place in known:
                if place.file == number:
                    for area in written_in(Area(place.start, place.stop)):
                        file.write(place.of(area))

        try:
            by_threads(write, sorted({place.file for place in known + new}), _THREADS)
        except OSError:
            with contextlib.suppress(OSError):  # the room is free later, then
                self._free_unused(mappings)
            raise
        written = Written(self, self.files, known + new)
        self._pending.add(written)
        return written

    def _are_pending(self) -> list[Place]:
        """Places to which something was written that is in memory yet."""
        return [place for each in self._pending for place in each.places if each.files is self.files]

    def bring_back(self, areas: Sequence[Area], copied: Sequence[Area] = ()) -> None:
        """Have pages be in memory, as far as they are in the files.

        Args:
            areas: The pages.
            copied: Those of them that are to be written into afterwards, and that nobody writes into meanwhile.

        Raises:
            OSError: There is no memory for them. They hold what they held, wherever that is.
        """
        with _one_at_a_time:
            self._bring_back(areas, copied)

    def _bring_back(self, areas: Sequence[Area], copied: Sequence[Area]) -> None:
        homes = self._homes(mappings_now())
        large = [area for area in copied if area.stop - area.start >= _LEAST_COPIED_BYTES]
        away = merged((area.start, area.stop - area.start) for area, _ in split(large, homes)[0])
        for some in _batches(away):
            self._copy_back(some, homes)
        for area in areas:
            if libc().madvise(area.start, area.stop - area.start, _POPULATE_READ):
                if ctypes.get_errno() != errno.EINVAL:
                    check(-1)
                for page in range(area.start, area.stop, PAGE):  # an older kernel
                    ctypes.c_char.from_address(page).value  # noqa: B018 - reading it is what this is for
        back = merged((area.start, area.stop - area.start) for area in [*self._awake, *areas])
        self._awake = [area for area, _ in split(back, homes)[0]]

    def forget(self, areas: Sequence[Area]) -> None:
        """Free the room of pages that were emptied.

        Raises:
            OSError: The file system can't: it is tried again when something is written there.
        """
        with _one_at_a_time:
            self._back = [
                place.of(left) for place in self._back for left in split([Area(place.start, place.stop)], areas)[1]
            ]
            if not self._has_heirs:
                self._free_unused(mappings_now())

    def _copy_back(self, areas: Sequence[Area], homes: Sequence[Place]) -> None:
        """Copy pages into memory of the process's own and move that into their place."""
        with contextlib.ExitStack() as stack:
            # All of the kernel's tables are changed before and after: faults in `read` keep others from changing them.
            copies = [stack.enter_context(contextlib.closing(Copy(area))) for area in areas]
            parts = [
                (copy, home.of(piece))
                for copy in copies
                for area, home in split([copy.area], homes)[0]
                for piece in _pieces(area, _READ_BYTES)
            ]
            # The kernel clears the memory first, which takes as long as to copy into it: both on several CPUs.
            by_threads(lambda part: part[0].read(self.files[part[1].file], part[1]), parts, _THREADS)
            # Whoever has written into it while it was away has pages there that aren't in the file.
            are_whole = by_threads(lambda copy: next(written_in(copy.area), None) is None, copies, _THREADS)
            moved = {copy for copy, is_whole in zip(copies, are_whole, strict=True) if is_whole}
            for copy in moved:
                copy.move()
        self._back = joined([*self._back, *(place for copy, place in parts if copy in moved)])

    def _placed(self, areas: Sequence[Area], mappings: Sequence[Mapping]) -> list[Place]:
        """Places for pages that aren't in a file, those that they had if they had some; there is room from now on."""
        self._free_unused(mappings)
        had, without = split(areas, self._back)
        shares = [0] * len(self.files)
        places = []
        for area in without:
            for piece in _pieces(area, _PIECE_BYTES):
                number = shares.index(min(shares))
                places.append(Place(*piece, number, self.files[number].size + shares[number]))
                shares[number] += piece.stop - piece.start
        try:
            for file, share in zip(self.files, shares, strict=True):
                file.reserve(share)
        except OSError:
            for file in self.files:
                file.cut()
            raise
        for file, share in zip(self.files, shares, strict=True):
            file.size += share
        return [place.of(area) for area, place in had] + places

    def _give_up_places(self, areas: Sequence[Area]) -> None:
        """Free the places of memory whose contents aren't in them any more, but of what is about to go."""
        self._back = [place.of(area) for area, place in split(areas, self._back)[0]]
        homes, going = self._homes(mappings_now()), self._going(areas)
        self._free_written(split((Area(home.start, home.stop) for home in homes), going)[1], homes)

    def _give_up_copies(self, areas: Sequence[Area]) -> None:
        """The same for what is awake and nobody has written into: as far as there is memory for it."""
        homes = self._homes(mappings_now())
        awake = (area for area, _ in split(self._awake, homes)[0])  # the rest was freed meanwhile
        for some in _batches(split(awake, self._going(areas))[1]):
            if size_of(some) > free_memory():
                return
            for area in some:
                if libc().madvise(area.start, area.stop - area.start, _POPULATE_WRITE):
                    return  # an older kernel, or there is no memory
            self._free_written(some, homes)

    def _going(self, areas: Iterable[Area]) -> list[Area]:
        """What is about to go: these, and what others have written."""
        pending = [Area(place.start, place.stop) for place in self._are_pending()]
        return merged((area.start, area.stop - area.start) for area in [*areas, *pending])

    def _free_written(self, areas: Iterable[Area], homes: Sequence[Place]) -> None:
        """Free the places of pages that somebody has written into. They get them again when they are put away."""
        tell = [file.tells_written() for file in self.files]
        for area, home in split(areas, homes)[0]:
            for written in written_in(area) if tell[home.file] else ():
                if self._has_heirs:  # one that was forked before these were written needs them
                    return
                self.files[home.file].free(home.of(written))

    def drop(self, written: Written) -> None:
        """Free the room of what was written and doesn't go."""
        self._pending.discard(written)
        if not self._has_heirs:
            with contextlib.suppress(OSError):  # the room is free later, then
                self._free_unused(mappings_now())

    def has_put_away(self, places: Iterable[Place]) -> None:
        """Note that pages are in the files only."""
        gone = merged((place.start, place.stop - place.start) for place in places)
        self._awake = split(self._awake, gone)[1]

    def _free_unused(self, mappings: Sequence[Mapping]) -> None:
        """Free what no page has a place in, as its memory was freed, or holds zeros."""
        self._back = [each for each in self._back if split([Area(each.start, each.stop)], mappings)[0]]
        taken = [*self._homes(mappings), *self._back, *self._are_pending()]
        for number, file in enumerate(self.files):
            file.free_all_but([place for place in taken if place.file == number])

    def _homes(self, mappings: Sequence[Mapping]) -> list[Place]:
        """The places of pages that are in the files."""
        return [
            Place(each.start, each.stop, self._ids[each.file], each.offset)
            for each in mappings
            if each.file in self._ids
        ]


@attrs.frozen(eq=False)
class Written:
    """Pages whose contents are in files, too.

    Attributes:
        files: These.
        places: Where in them.
    """

    _spill: Spill
    files: Sequence[SpillFile]
    places: Sequence[Place]

    def __len__(self) -> int:
        return len(self.places)

    def put_away(self) -> None:
        """Have them be in the files only. Nobody may have written into them since they were written there."""
        with _one_at_a_time:
            self._spill.has_put_away(self.places)
            for place in self.places:
                self.files[place.file].replace(place)

    def drop(self) -> None:
        """They stay in memory: the room is free again of those that had none in the files."""
        with _one_at_a_time:
            self._spill.drop(self)


def _batches(areas: Iterable[Area]) -> Iterator[list[Area]]:
    """Them in lots: the system may have set memory aside for each of the pages, and has to again for a copy."""
    batch, size = [], 0
    for area in areas:
        for piece in _pieces(area, _BATCH_BYTES):
            batch.append(piece)
            size += piece.stop - piece.start
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(area: Area, most: int) -> Iterator[Area]:
    """It in pieces for several threads; each but the first begins with a large page."""
    at = area.start
    while at < area.stop:
        stop = min(area.stop, (at // most + 1) * most)
        if area.stop - stop < _LEAST_COPIED_BYTES:
            stop = area.stop
        yield Area(at, stop)
        at = stop
