"""A file without a name, to which memory goes: it ends with the process, also by SIGKILL."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

from colocate._system.room import spill_directories
from colocate._system.sizes import size_text

_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


class SpillFile:
    """The file, which grows by pieces that are mapped.

    Attributes:
        directory: Where its bytes lie.
        close: Has it grow no more; its bytes are freed when none of them is mapped.
    """

    def __init__(self, directory: Path) -> None:
        """Make it.

        Raises:
            OSError: There is no such directory, or no file can be made there.
            ValueError: Files there are in memory themselves.
        """
        if (kind := file_system(directory)) in _MEMORY_FILE_SYSTEMS:
            raise ValueError(f"{directory} is a {kind}: what is put there stays in memory")
        self.directory = directory
        self._descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._size = 0

    @classmethod
    def somewhere(cls, wanted: str | None) -> SpillFile:
        """Make one in the folder that was named, or in the first of the usual ones where that can be.

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

    def more(self, nbytes: int) -> mmap.mmap:
        """Map so many bytes more, for which the disk has room: whole pages.

        Raises:
            OSError: It has none, or the process may have no more of it: the file is as it was.
        """
        try:
            os.posix_fallocate(self._descriptor, self._size, nbytes)
            found = mmap.mmap(self._descriptor, nbytes, offset=self._size)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            why = f"{error.strerror}"
            if error.errno == errno.EFBIG:
                why += ", as the limit of this process has it (ulimit -f)"
            if error.errno == errno.EMFILE:
                why += " (ulimit -n)"
            why += f": {size_text(nbytes)} are to sleep in {self.directory} (spill_dir)"
            with suppress(OSError):  # the folder isn't there any more, of which the file has no need
                disk = os.statvfs(self.directory)
                why += f", on whose disk {size_text(disk.f_bavail * disk.f_frsize)} are free"
            raise OSError(error.errno, why) from error
        self._size += nbytes
        return found


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
