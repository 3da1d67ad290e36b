"""How much memory is free for this process, and where on a disk more of it may lie."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that this process may have before the machine, or the limit of its control group, has no more."""
    import psutil  # by what is rarely asked for, and a worker starts sooner

    free = int(psutil.virtual_memory().available)
    return min([free, *_left_of_limits()])


def _left_of_limits() -> list[int]:
    """What the control groups of this process, from its own to the outermost, leave it (cgroup v2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    left = []
    for folder in (_CGROUPS / own, *(_CGROUPS / own).parents):
        if not folder.is_relative_to(_CGROUPS):
            break
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


def spill_directories(wanted: str | None) -> list[str]:
    """The folders in which memory may be put away, the first that does: the one that was named, or the usual ones."""
    if wanted is not None:
        return [wanted]
    # Not `tempfile.gettempdir()`, which writes a file there to see whether it may: who is killed then leaves that.
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    return list(dict.fromkeys([*named, "/tmp", "/var/tmp", os.getcwd()]))
