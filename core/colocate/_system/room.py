"""Measure free memory, count kills for lack of memory, and store sleeping (offloaded) memory in a file."""

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

from colocate._system.numbers import format_size

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_COUNTS = Path("/proc/vmstat")


def read_free_memory() -> int:
    """Return the bytes that this process can still allocate, limited by the machine and by control groups."""
    import psutil  # Imported late, so that workers start fast.

    free = int(psutil.virtual_memory().available)
    return min(
        [free, *(remaining for group in _list_control_groups() if (remaining := group.read_remaining()) is not None)]
    )


def read_private_bytes(pid: int | None = None) -> int:
    """Return the bytes of a process that are neither shared nor mapped from files; 0 for an ended process."""
    # This avoids psutil, because each worker calls this at the start, and the import would double the start-up time.
    try:
        with open(f"/proc/{pid or 'self'}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:  # The process has ended.
        return 0
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


@attrs.frozen
class _ControlGroup:
    """A control group of this process, with a memory limit and counters.

    Attributes:
        folder: The group's folder in the kernel's file system.
        unified: Whether the group belongs to cgroup v2.
    """

    folder: Path
    unified: bool

    def read_remaining(self) -> int | None:
        """Return the free bytes below the control group's memory limit; None without a limit."""
        limit, used, of_all = (
            ("memory.max", "memory.current", "")
            if self.unified
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        try:
            most, now = (self.folder / limit).read_text().strip(), int((self.folder / used).read_text())
            numbers = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            # Cached files count as free, because the kernel frees the page cache on demand.
            files = sum(int(numbers.get(f"{of_all}{kind}_file", 0)) for kind in ("inactive", "active"))
            return None if most == "max" else max(0, int(most) - now + files)
        except (OSError, ValueError):  # The outermost control group has no such files.
            return None

    @property
    def events(self) -> Path:
        """The file with the kernel's count of OOM kills."""
        return self.folder / ("memory.events" if self.unified else "memory.oom_control")


def _list_control_groups() -> list[_ControlGroup]:
    """Return the control groups of this process, innermost first."""
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:
        return []
    # If both cgroup versions are mounted, v1 may control memory. The line of v2 names no controllers.
    for controller, root in (("memory", _CGROUPS / "memory"), ("", _CGROUPS)):
        for _, controllers, path in lines:
            if controller in controllers.split(","):
                own_folder = root / path.lstrip("/")
                folders = [folder for folder in (own_folder, *own_folder.parents) if folder.is_relative_to(root)]
                return [_ControlGroup(folder, not controller) for folder in folders]
    return []


@attrs.frozen
class OomKills:
    """A count of processes that the kernel has killed for lack of memory.

    Attributes:
        number: The count; 0 if there is no counter.
        subject: The counter's scope, in words.
        path: The counter's file.
    """

    number: int
    subject: str
    path: Path

    @classmethod
    def read_now(cls) -> OomKills:
        """Read the OOM counter of this process's control group, or else of the machine.

        In a container the group's path may be the host's, which doesn't exist inside. Then an enclosing group counts.
        """
        groups = [(group.events, "its control group") for group in _list_control_groups()]
        for path, subject in [*groups, (_COUNTS, "this machine")]:
            try:
                counts = dict(line.split() for line in path.read_text().splitlines())
                return cls(int(counts["oom_kill"]), subject, path)
            except (OSError, ValueError, KeyError):  # An old kernel lacks the counter.
                continue
        return cls(0, "nobody", _COUNTS)

    def describe_since(self) -> str | None:
        """Describe the OOM kills since this count, as a hint at the cause of a worker's death; None for no kills."""
        more = (now := self.read_now()).number - self.number
        if more <= 0 or now.path != self.path:
            return None
        processes = "a process" if more == 1 else f"{more} processes"
        whom = f"{processes} of {self.subject}"
        return f"since it was started the kernel has killed {whom} for lack of memory (oom_kill in {self.path})"


def find_spill_problem(value: Any) -> str | None:
    """Return an error text for an invalid spill folder, or None."""
    if isinstance(value, str) and os.path.isabs(value):
        return None
    return f"must be an absolute path, since it is one on the workers' machines, not {value!r}"


_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


class SpillFile:
    """An unnamed temporary file for sleeping (offloaded) memory.

    Attributes:
        directory: The folder of the file.
        close: Frees the disk space.
    """

    def __init__(self, directory: Path) -> None:
        if (kind := get_file_system(directory)) in _MEMORY_FILE_SYSTEMS:
            raise ValueError(f"{directory} is a {kind}: what is put there stays in memory")
        self.directory = directory
        self._descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._size = 0

    @classmethod
    def create_somewhere(cls, wanted: str | None) -> SpillFile:
        """Create a spill file in the wanted folder, or else in the first usual folder that works.

        Raises:
            ValueError: No folder works.
        """
        # `tempfile.gettempdir()` isn't used, because a killed process would leave a test file behind.
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
        """Grow the file to at least `nbytes` bytes, reserving disk space.

        Raises:
            OSError: The disk is full, or a limit of the process is reached: the file is unchanged.
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
            why += f": {format_size(more)} are to sleep in {self.directory} (spill_dir)"
            with suppress(OSError):  # The folder may have been removed while the file is open.
                disk = os.statvfs(self.directory)
                why += f", on whose disk {format_size(disk.f_bavail * disk.f_frsize)} are free"
            raise OSError(error.errno, why) from error
        self._size = nbytes

    def write_from(self, view: Any, start: int) -> None:
        self._move_bytes(os.pwritev, view, start)

    def read_into(self, view: Any, start: int) -> None:
        self._move_bytes(os.preadv, view, start)

    def _move_bytes(self, move: Callable[[int, list[memoryview], int], int], view: Any, start: int) -> None:
        # With an array made from the tensor, torch couldn't free the tensor's memory afterwards.
        memory = memoryview((ctypes.c_ubyte * view.numel()).from_address(view.data_ptr()))
        while memory:  # The kernel moves at most 2 GiB per call.
            if not (done := move(self._descriptor, [memory], start)):
                raise OSError(errno.EIO, f"the file in {self.directory} (spill_dir) has lost what slept there")
            memory, start = memory[done:], start + done


def get_file_system(directory: Path) -> str:
    path = directory.resolve(strict=True)
    kind, longest = "", -1
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mounted, name, *_ = line.split(" ")
        place = Path(mounted.encode().decode("unicode_escape"))
        if path.is_relative_to(place) and len(place.parts) >= longest:
            kind, longest = name, len(place.parts)
    return kind
