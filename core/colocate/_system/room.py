"""How much memory is free for this process, where on a disk more of it may lie, and who was killed for lack of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_COUNTS = Path("/proc/vmstat")


def free_memory() -> int:
    """Bytes that this process may have before the machine, or the limit of its control group, has no more."""
    import psutil  # by what is rarely asked for, and a worker starts sooner

    free = int(psutil.virtual_memory().available)
    return min([free, *(left for group in _control_groups() if (left := group.left()) is not None)])


@attrs.frozen
class _ControlGroup:
    """One of those that this process is in, whose memory is limited and counted.

    Attributes:
        folder: Where the kernel shows it.
        unified: Whether it is of cgroup v2.
    """

    folder: Path
    unified: bool

    def left(self) -> int | None:
        """What its limit leaves; None without one."""
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
    """Those of this process, from its own to the outermost."""
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
        """Those of this process's control group, or, where that has no count, of the machine.

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
        """Those that have come since, as what a worker's death has to do with; None without any."""
        more = (now := self.now()).number - self.number
        if more <= 0 or now.path != self.path:
            return None
        processes = "a process" if more == 1 else f"{more} processes"
        whom = f"{processes} of {self.whose}"
        return f"since it was started the kernel has killed {whom} for lack of memory (oom_kill in {self.path})"


def spill_problem(value: Any) -> str | None:
    """What is wrong with the name of a folder for what sleeps, in words; None when nothing is."""
    if isinstance(value, str) and os.path.isabs(value):
        return None
    return f"must be an absolute path, since it is one on the workers' machines, not {value!r}"


def spill_directories(wanted: str | None) -> list[str]:
    """The folders in which memory may be put away, the first that does: the one that was named, or the usual ones."""
    if wanted is not None:
        return [wanted]
    # Not `tempfile.gettempdir()`, which writes a file there to see whether it may: who is killed then leaves that.
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    return list(dict.fromkeys([*named, "/tmp", "/var/tmp", os.getcwd()]))
