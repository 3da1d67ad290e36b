"""How much memory is free for this process, where on a disk more of it may lie, and who was killed for lack of it."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

_CGROUPS = Path("/sys/fs/cgroup")
_COUNTS = Path("/proc/vmstat")


def free_memory() -> int:
    """Bytes that this process may have before the machine, or the limit of its control group, has no more."""
    import psutil  # by what is rarely asked for, and a worker starts sooner

    free = int(psutil.virtual_memory().available)
    return min([free, *_left_of_limits()])


def _left_of_limits() -> list[int]:
    """What the control groups of this process, from its own to the outermost, leave it."""
    left = []
    for folder in _control_groups():
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            numbers = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the outermost has none
            continue
        if limit != "max":
            # What files have in memory goes when it is wanted.
            files = int(numbers.get("inactive_file", 0)) + int(numbers.get("active_file", 0))
            left.append(max(0, int(limit) - used + files))
    return left


def _control_groups() -> list[Path]:
    """The folders of this process's control groups, from its own to the outermost (cgroup v2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    folders = (_CGROUPS / own, *(_CGROUPS / own).parents)
    return [folder for folder in folders if folder.is_relative_to(_CGROUPS)]


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
        """Those of this process's control group, or, where that has no count, of the machine."""
        groups = [(path / "memory.events", "its control group") for path in _control_groups()[:1]]
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


def spill_directories(wanted: str | None) -> list[str]:
    """The folders in which memory may be put away, the first that does: the one that was named, or the usual ones."""
    if wanted is not None:
        return [wanted]
    # Not `tempfile.gettempdir()`, which writes a file there to see whether it may: who is killed then leaves that.
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    return list(dict.fromkeys([*named, "/tmp", "/var/tmp", os.getcwd()]))
