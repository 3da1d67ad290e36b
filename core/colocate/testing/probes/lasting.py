"""Roles whose state outlives their workers, or doesn't."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from colocate import Concat, Gather, OnRank, Role, Scatter, method
from colocate.testing.gate import Address, pass_gate


class Lasting(Role):
    """Counts, and can be saved.

    Args:
        gate: Where its constructor waits from the second generation on; None: nowhere.
        breaks: How many generations after the first it can't be constructed in.
        unsaved: Whether `save` raises.
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


class Called(Lasting):
    """Its `save` and `restore` may be called by its callers, too.

    Args:
        gate: Where `restore` waits when it has read; None: nowhere.
    """

    def __init__(self, gate: Address | None = None) -> None:
        super().__init__()
        self.gate = gate

    @method
    async def save(self, directory: str) -> None:  # type: ignore[override]  # pyright: ignore
        super().save(directory)

    @method
    def restore(self, directory: str) -> None:  # type: ignore[override]  # pyright: ignore
        super().restore(directory)
        if self.gate is not None:
            pass_gate(self.gate)


class Exporting(Lasting):
    """Its `save` and `restore` are another thing, by one rank alone."""

    @method(dispatch=OnRank(0))
    def save(self, directory: str) -> None:  # pyright: ignore
        """Nothing."""

    @method
    def restore(self, step: int, directory: str) -> None:  # type: ignore[override]  # pyright: ignore
        """Nothing."""


class Resizable(Role):
    """Can be restored by any number of ranks: they go on from the sum of what was counted."""

    def __init__(self) -> None:
        self.count = 0

    @method
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    def save(self, directory: str) -> None:
        Path(directory, str(self.ctx.rank)).write_text(str(self.count))

    def restore(self, directory: str, ranks: int) -> None:
        self.count = sum(int(Path(directory, str(rank)).read_text()) for rank in range(ranks))


class Distributed(Resizable):
    """Its files are like those of torch.distributed.checkpoint, by their names."""

    def restore(self, directory: str) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self.count = int(Path(directory, "0").read_text())

    def save(self, directory: str) -> None:
        super().save(directory)
        Path(directory, ".metadata").touch()


class Passing(Role):
    """Counts, and can't be saved."""

    def __init__(self) -> None:
        self.count = 0

    @method
    def add(self) -> int:
        self.count += 1
        return self.count


class HalfSaved(Passing):
    """Saves itself, and can't be restored."""

    def save(self, directory: str) -> None:
        """Nothing."""


class Drawing(Role):
    """Draws random numbers. Needs torch."""

    @method
    def draw(self) -> list[int]:
        import torch

        return [int(n) for n in torch.randint(0, 1 << 30, (3,), generator=self.ctx.generator)]

    def save(self, directory: str) -> None:
        """It has no other state."""

    def restore(self, directory: str) -> None:
        """It has no other state."""
