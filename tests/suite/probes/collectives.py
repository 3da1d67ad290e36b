"""Roles in process groups, rightly and wrongly. Each needs torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from colocate import ColocateError, PerRank, Role, method, needs
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes import import_optional
from colocate.testing.probes.collectives import Collective

if TYPE_CHECKING:
    import torch
else:
    torch = import_optional("torch")


class Own(Role):
    """Makes torch's default group itself."""

    @method
    def make(self) -> None:
        import torch.distributed as dist

        store = dist.HashStore()  # type: ignore[attr-defined]  # torch has it here without saying so
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


class Launched(Role):
    """What a script finds in its constructor that was written for torchrun, and makes the default group by itself."""

    def __init__(self, **wanted: Any) -> None:
        import torch.distributed as dist

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.variables = {name: int(os.environ[name]) for name in names}
        dist.init_process_group("gloo", rank=self.variables["RANK"], world_size=self.variables["WORLD_SIZE"])
        dist.init_process_group(**wanted)
        self.by_torch = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()

    @method
    def facts(self) -> tuple[dict[str, int], tuple[int, int], bool]:
        """The variables, what torch says, and whether they name the rendezvous."""
        named = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return self.variables, self.by_torch, named == (self.ctx.rendezvous.host, self.ctx.rendezvous.port)


class Meeting(Role):
    """Uses the rendezvous."""

    def __init__(self) -> None:
        self.rendezvous = self.ctx.rendezvous

    @method(dispatch=PerRank("text"))
    def put(self, text: str) -> None:
        self._store().set(f"text of {self.ctx.rank}", text)

    @method
    def take(self) -> list[str]:
        store = self._store()
        return [store.get(f"text of {rank}").decode() for rank in range(self.ctx.world_size)]

    def _store(self) -> Any:
        import torch.distributed as dist

        return dist.TCPStore(self.rendezvous.host, self.rendezvous.port, is_master=False)  # type: ignore[attr-defined]


@needs("process_group")
class GroupRequest(Collective):
    """Says that it uses process groups."""


@needs("process_group")
class Careless(Role):
    """A role whose collectives don't raise where their group is cut."""

    @method
    def fail(self, rank: int, gate: Address) -> None:
        """One rank raises, after the gate; the others return at once."""
        if self.ctx.rank == rank:
            pass_gate(gate)
            raise ValueError("on purpose")

    @method
    def total(self, gate: Address | None = None) -> float:
        """The sum of 1 over all ranks, or whatever a cut group has left there."""
        import torch.distributed as dist

        if gate is not None and self.ctx.rank == 0:
            pass_gate(gate)
        total = torch.ones(1)
        try:
            dist.all_reduce(total, group=self.ctx.process_group())
        except (ColocateError, RuntimeError):
            pass
        return float(total)
