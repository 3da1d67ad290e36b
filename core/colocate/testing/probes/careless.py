"""A role that takes no notice of what its collectives say, as one does whose collectives run on a GPU."""

from __future__ import annotations

from colocate import ColocateError, Role, method, needs
from colocate.testing.gate import Address, pass_gate


@needs("process_group")
class Careless(Role):
    """Its collectives don't raise where their group is cut."""

    @method
    def fail(self, rank: int, gate: Address) -> None:
        """One rank raises, after the gate; the others return at once."""
        if self.ctx.rank == rank:
            pass_gate(gate)
            raise ValueError("on purpose")

    @method
    def total(self, gate: Address | None = None) -> float:
        """The sum of 1 over all ranks, or whatever a cut group has left there."""
        import torch
        import torch.distributed as dist

        if gate is not None and self.ctx.rank == 0:
            pass_gate(gate)
        found = torch.ones(1)
        try:
            dist.all_reduce(found, group=self.ctx.process_group())
        except (ColocateError, RuntimeError):
            pass
        return float(found)


class Independent(Role):
    """Makes torch's default group by itself, as a library does that knows nothing of colocate.

    Args:
        folder: Where its ranks meet.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._made = folder, 0
        self._make()

    def _make(self) -> None:
        import torch.distributed as dist

        self._made += 1
        meeting = f"file://{self._folder}/{self._made}"
        dist.init_process_group("gloo", meeting, rank=self.ctx.rank, world_size=self.ctx.world_size)

    def renew(self) -> None:
        """Make another one, after the one that was cut."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._make()

    @method
    def total(self, failing: int | None = None, gate: Address | None = None) -> float:
        """The sum of 1 over all ranks; one of them may raise instead, after the gate."""
        import torch
        import torch.distributed as dist

        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError("on purpose")
        found = torch.ones(1)
        dist.all_reduce(found)
        return float(found)
