"""Tasks, timers and servers that role code leaves in its event loop run between calls, and end with the group."""

from __future__ import annotations

from pathlib import Path

import colocate
from colocate.testing.executors import left
from colocate.testing.executors._base import Spawn
from colocate.testing.probes.left import Leaves


class LeftInLoops(left.LeftInLoops):
    """Asyncio tasks that outlive their call."""

    def test_left_task_is_cancelled_at_close(self, spawn: Spawn, tmp_path: Path) -> None:
        """A task that is left at the group's close is cancelled, and may run its cleanup."""
        group = spawn({"leaves": colocate.role(Leaves)})
        group.role("leaves", Leaves).writes_at_its_end(tmp_path / "end")
        group.close()
        assert {file.name for file in tmp_path.iterdir()} == {"end-0", "end-1"}
