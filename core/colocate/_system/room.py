"""Memory that this process has, and that is free for it; who was killed for lack of it; the file where it may go."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from colocate._system.numbers import size_text

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_COUNTS = Path("/proc/vmstat")


def free_memory() -> int:
    """Return bytes that this process may have before the machine, or the limit of its control group, has no more."""
    import psutil  # by what is rarely asked for, and a worker starts sooner

    free = int(psutil.virtual_memory().available)
    return min([free, *(left for group in _control_groups() if (left := group.left()) is not None)])


def private_bytes(pid: int | None = None) -> int:
    """Return the memory of this process, or another, that isn't mapped from files or shared on purpose."""
    # Not by psutil: each worker asks once as it starts, and to import that takes as long as all the rest of a start.
    try:
        with open(f"/proc/{pid or 'self'}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:  # it is gone
        return 0
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


@attrs.frozen
class _ControlGroup:
    """A control group that this process is in, whose memory is limited and counted.

    Attributes:
        folder: Where the kernel shows it.
        unified: Whether it is of cgroup v2.
    """

    folder: Path
    unified: bool

    def left(self) -> int | None:
        """Return what its limit leaves; None without one."""
        limit, used, of_all = (
            ("memory.max", "memory.current", "")
            if self.unified
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        try:
            most, now = (self.folder / limit).read_text().strip(), int((self.folder / used).read_text())
            numbers = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            # What files have in memory goes when it is wanted.
            files = sum(int(numbers.get(f"{of_all}{kind}_file", 0)) for kind in ("inactive", "active"))
            return None if most == "max" else max(0, int(most) - now + files)
        except (OSError, ValueError):  # the outermost has none
            return None

    @property
    def events(self) -> Path:
        """Where the processes are counted that the kernel has killed."""
        return self.folder / ("memory.events" if self.unified else "memory.oom_control")


def _control_groups() -> list[_ControlGroup]:
    """Return those of this process, from its own to the outermost."""
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:
        return []
    # Where both versions are, memory may be the older one's affair. The newer one's line names nothing.
    for wanted, root in (("memory", _CGROUPS / "memory"), ("", _CGROUPS)):
        for _, controllers, path in lines:
            if wanted in controllers.split(","):
                own = root / path.lstrip("/")
                folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
                return [_ControlGroup(folder, not wanted) for folder in folders]
    return []


@attrs.frozen
class OomKills:
    """How many processes the kernel has killed for lack of memory.

    Attributes:
        number: So many; 0 where nobody counts.
        whose: Of what.
        path: Where it counts them.
    """

    number: int
    whose: str
    path: Path

    @classmethod
    def now(cls) -> OomKills:
        """Return those of this process's control group, or, where that has no count, of the machine.

        In a container the own one may be called as it is outside, where its folder isn't; one around it is it then.
        """
        groups = [(group.events, "its control group") for group in _control_groups()]
        for path, whose in [*groups, (_COUNTS, "this machine")]:
            try:
                counts = dict(line.split() for line in path.read_text().splitlines())
                return cls(int(counts["oom_kill"]), whose, path)
            except (OSError, ValueError, KeyError):  # an old kernel
                continue
        return cls(0, "nobody", _COUNTS)

    def since(self) -> str | None:
        """Return those that have come since, as what a worker's death has to do with; None without any."""
        more = (now := self.now()).number - self.number
        if more <= 0 or now.path != self.path:
            return None
        processes = "a process" if more == 1 else f"{more} processes"
        whom = f"{processes} of {self.whose}"
        return f"since it was started the kernel has killed {whom} for lack of memory (oom_kill in {self.path})"


def spill_problem(value: Any) -> str | None:
    """Return what is wrong with the name of a folder for what sleeps, in words; None when nothing is."""
    if isinstance(value, str) and os.path.isabs(value):
        return None
    return f"must be an absolute path, since it is one on the workers' machines, not {value!r}"


_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


class SpillFile:
    """The file.

    Attributes:
        directory: Where its bytes lie.
        close: Frees them.
    """

    def __init__(self, directory: Path) -> None:
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
        # Not `tempfile.gettempdir()`, which writes a file there to see whether it may: who is killed then leaves that.
        named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
        usual = dict.fromkeys([*named, "/tmp", "/var/tmp", os.getcwd()])
        reasons = []
        for directory in usual if wanted is None else [wanted]:
            try:
                return cls(Path(directory))
            except (OSError, ValueError) as error:
                reasons.append(str(error))
        raise ValueError(
            f"memory can't sleep here ({'; '.join(reasons)}): name a folder on a disk as connect(spill_dir=...), in a "
            "config as executor.with.spill_dir"
        )

    def grow(self, nbytes: int) -> None:
        """Have so many bytes at least, for which the disk has room.

        Raises:
            OSError: It has none, or the process may have no more of it: the file is as it was.
        """
        more = nbytes - self._size
        if more <= 0:
            return
        try:
            os.posix_fallocate(self._descriptor, self._size, more)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            why = f"{error.strerror}"
            if error.errno == errno.EFBIG:
                why += ", as the limit of this process has it (ulimit -f)"
            why += f": {size_text(more)} are to sleep in {self.directory} (spill_dir)"
            with suppress(OSError):  # the folder isn't there any more, of which the file has no need
                disk = os.statvfs(self.directory)
                why += f", on whose disk {size_text(disk.f_bavail * disk.f_frsize)} are free"
            raise OSError(error.errno, why) from error
        self._size = nbytes

    def write(self, view: Any, start: int) -> None:
        """Write a tensor of bytes."""
        self._move(os.pwritev, view, start)

    def read(self, view: Any, start: int) -> None:
        """Read into one."""
        self._move(os.preadv, view, start)

    def _move(self, move: Callable[[int, list[memoryview], int], int], view: Any, start: int) -> None:
        # Not by an array of the tensor: who has made one of it can't have it lose its memory any more.
        memory = memoryview((ctypes.c_ubyte * view.numel()).from_address(view.data_ptr()))
        while memory:  # the kernel moves 2 GiB at most
            if not (done := move(self._descriptor, [memory], start)):
                raise OSError(errno.EIO, f"the file in {self.directory} (spill_dir) has lost what slept there")
            memory, start = memory[done:], start + done


def file_system(directory: Path) -> str:
    """Return the type of the file system that a directory lies on."""
    path = directory.resolve(strict=True)
    kind, longest = "", -1
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mounted, name, *_ = line.split(" ")
        place = Path(mounted.encode().decode("unicode_escape"))
        if path.is_relative_to(place) and len(place.parts) >= longest:
            kind, longest = name, len(place.parts)
    return kind
