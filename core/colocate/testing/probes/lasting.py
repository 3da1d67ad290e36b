"""A role whose state can be saved, for tests of checkpoints and restarts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from colocate import Concat, Gather, Role, Scatter, method
from colocate.testing.gate import Address, pass_gate


class Lasting(Role):
    """A role that counts, and whose count can be saved and restored.

    Args:
        gate: The gate where the constructor waits from the second generation on; None for no wait.
        breaks: The number of generations after the first in which the constructor raises.
        unsaved: Whether `save` raises on rank 1.
    """

    def __init__(self, gate: Address | None = None, breaks: int = 0, unsaved: bool = False) -> None:
        self.count = 0
        self.unsaved = unsaved
        if 0 < self.ctx.generation <= breaks:
            raise ValueError(f"it doesn't come back in generation {self.ctx.generation}")
        if gate is not None and self.ctx.generation:
            pass_gate(gate)

    @method
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    @method(dispatch=Scatter("rows"), collect=Concat())
    def counted(self, rows: list[int]) -> list[int]:
        return [row + self.count for row in rows]

    @method
    def wait(self, gate: Address) -> int:
        pass_gate(gate)
        return self.count

    @method(collect=Gather())
    def tell(self) -> tuple[int, int, int]:
        return self.count, self.ctx.generation, os.getpid()

    @method
    def kill(self, rank: int = 0) -> None:
        if self.ctx.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self, directory: str) -> None:
        Path(directory, str(self.ctx.rank)).write_text(str(self.count))
        if self.unsaved and self.ctx.rank == 1:
            raise OSError("the disk is full")

    def restore(self, directory: str) -> None:
        self.count = int(Path(directory, str(self.ctx.rank)).read_text())
