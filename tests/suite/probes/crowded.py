"""A role whose process has no free descriptor."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from colocate import Role, method


class Crowded(Role):
    """A counting role that can forbid its process to open files."""

    def __init__(self) -> None:
        self.count = 0
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    @method
    def crowd(self) -> None:
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, self.limits[1]))

    @method
    def relieve(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)

    @method(rows="row", concurrency=4)
    async def double(self, row: int) -> int:
        return 2 * row

    @method
    def step(self) -> int:
        self.count += 1
        return self.count

    def save(self, folder: Path) -> None:
        (Path(folder) / "count").write_text(str(self.count))

    def restore(self, folder: Path) -> None:
        self.count = int((Path(folder) / "count").read_text())
