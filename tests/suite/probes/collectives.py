"""Roles that use process groups, correctly or not. Each needs torch."""

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
    """A role that makes torch's default group itself."""

    @method
    def make(self) -> None:
        import torch.distributed as dist

        store = dist.HashStore()  # type: ignore[attr-defined]  # torch doesn't declare this name
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


class Launched(Role):
    """A role with a constructor written for torchrun, which makes the default group by itself."""

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
        """Return the variables, torch's rank and world size, and whether the address is the rendezvous."""
        named = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return self.variables, self.by_torch, named == (self.ctx.rendezvous.host, self.ctx.rendezvous.port)


class Meeting(Role):
    """A role that exchanges texts at the rendezvous."""

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
class GroupUser(Collective):
    """A role that declares its use of process groups."""


@needs("process_group")
class Careless(Role):
    """A role that ignores errors of its collectives."""

    @method
    def fail(self, rank: int, gate: Address) -> None:
        """Raise on one rank after the gate; return at once on the others."""
        if self.ctx.rank == rank:
            pass_gate(gate)
            raise ValueError("on purpose")

    @method
    def total(self, gate: Address | None = None) -> float:
        """Return the sum of 1 over all ranks, or the leftover value of a cut group."""
        import torch.distributed as dist

        if gate is not None and self.ctx.rank == 0:
            pass_gate(gate)
        total = torch.ones(1)
        try:
            dist.all_reduce(total, group=self.ctx.process_group())
        except (ColocateError, RuntimeError):
            pass
        return float(total)
