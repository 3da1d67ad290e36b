"""A role whose count shows whether its state survives a change of the driver."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from colocate import Gather, Role, method
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes.plain import Tracked

if TYPE_CHECKING:
    import weakref


class Counting(Role):
    """A role that counts, to show whether its state survives."""

    def __init__(self) -> None:
        self.count = 0
        self.made_ref: weakref.ref[Tracked] | None = None

    @method
    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    @method
    def pid(self) -> int:
        return os.getpid()

    @method
    def fail(self) -> None:
        if self.ctx.rank == 0:
            raise ValueError("it was told to")

    @method
    def draw(self) -> float:
        import torch

        return torch.rand(1, generator=self.ctx.generator).item()

    @method(collect=Gather())
    def made(self) -> Tracked:
        import weakref

        value = Tracked([1])
        self.made_ref = weakref.ref(value)
        return value

    @method
    def still_kept(self) -> bool:
        """Return whether the last result of `made` still exists in this process."""
        return self.made_ref is not None and self.made_ref() is not None

    @method
    def wait_and_add(self, gate: Address, ranks: Sequence[int] = (0, 1)) -> int:
        if self.ctx.rank in ranks:
            pass_gate(gate)
        self.count += 1
        return self.count

    @method
    def until_cancelled(self, gate: Address) -> None:
        """Pass a gate, work until the call is cancelled, and then count."""
        pass_gate(gate)
        pause = threading.Event()
        while not self.ctx.cancelled:
            pause.wait(0.002)
        self.count += 1

    @method
    def sum(self) -> float:
        return self._sum()

    def _sum(self) -> float:
        import torch
        import torch.distributed as dist

        one = torch.ones(1)
        dist.all_reduce(one, group=self.ctx.process_group())
        return one.item()
