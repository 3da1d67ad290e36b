"""A role that uses process groups, correctly and incorrectly. Needs torch."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, cast

from colocate import PerRank, Role, method
from colocate.testing.gate import Address, pass_gate, pass_gate_async
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
else:
    torch = import_optional("torch")


class Collective(Role):
    """A role that uses process groups, correctly and incorrectly."""

    def __init__(self) -> None:
        self.stored_group: ProcessGroup | None = None

    @method
    def sum(self, value: float, axis: str | None = None) -> float:
        return self._sum(value, self.ctx.process_group(axis))

    @method(dispatch=PerRank("value"))
    def sum_each(self, value: float, axis: str | None = None) -> float:
        return self._sum(value, self.ctx.process_group(axis))

    @method
    def facts(self, axis: str | None = None) -> tuple[int, int]:
        """Return torch's rank and size of the role's process group."""
        group = self.ctx.process_group(axis)
        return group.rank(), group.size()

    @method
    def in_default(self, asks: bool = True) -> tuple[int, int, list[int]]:
        """Return rank and size in torch's default group, and the role's ranks there; zeros without a default group."""
        import torch.distributed as dist

        group = self.ctx.process_group() if asks else None
        if not dist.is_initialized():
            return 0, 0, []
        return dist.get_rank(), dist.get_world_size(), [] if group is None else dist.get_process_group_ranks(group)

    @method
    def sum_in_default(self) -> float:
        """Return the sum of the slot numbers over torch's default group."""
        return self._sum(float(self.ctx.slot), None)

    @method
    def sum_in_own(self, failing: int | None = None, gate: Address | None = None) -> float:
        """Return the number of ranks, summed in a process group that the role creates by `dist.new_group`."""
        import torch.distributed as dist

        if self.stored_group is None:
            self.stored_group = cast("ProcessGroup", dist.new_group())
        return self._sum_unless(failing, self.stored_group, gate)

    @method
    def pass_on(self, failing: int | None = None) -> float:
        import torch.distributed as dist

        group, value = self.ctx.process_group(), torch.tensor([float(self.ctx.rank)])
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the transfer")
        if self.ctx.rank == 0:
            dist.send(value, group=group, group_dst=1)
        else:
            dist.recv(value, group=group, group_src=0)
        return float(value)

    @method
    def mesh(self, name: str | None = None) -> dict[str, tuple[int, int]]:
        """Return, for each axis of the torch mesh, this rank's index and the sum of the slot numbers."""
        mesh = self.ctx.device_mesh(name)
        assert mesh is self.ctx.device_mesh(name)
        axes = mesh.mesh_dim_names or ()
        return {
            axis: (mesh.get_local_rank(axis), round(self._sum(self.ctx.slot, mesh.get_group(axis)))) for axis in axes
        }

    @method
    def sum_unless(self, value: float, failing: int | None) -> float:
        """Sum over the ranks, but raise on rank `failing` before the collective in which the other ranks wait."""
        group = self.ctx.process_group()
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the collective")
        return self._sum(value, group)

    @method(dispatch=PerRank("gate"))
    def sum_at(self, gate: Address | None, value: float, failing: int) -> float:
        """Wait at the rank's gate, if any, then sum over the ranks, but raise on rank `failing`."""
        group = self.ctx.process_group()
        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the collective")
        return self._sum(value, group)

    @method
    def begin_sum(self) -> None:
        """Begin a collective operation, and never wait for its end."""
        torch.distributed.all_reduce(torch.ones(1), group=self.ctx.process_group(), async_op=True)

    @method(dispatch=PerRank("gate"))
    def fail_before_group(self, gate: Address | None, failing: int) -> float:
        """Raise on rank `failing` before it asks for the process group that the other ranks are creating."""
        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the group was made")
        return self._sum(1.0, self.ctx.process_group())

    @method(dispatch=PerRank("gate"))
    def sum_or_die(self, gate: Address | None, value: float) -> float:
        """Kill each rank that has a gate once the gate is open, while the other ranks wait in a collective."""
        group = self.ctx.process_group()
        if gate is not None:
            pass_gate(gate)
            os.kill(os.getpid(), signal.SIGKILL)
        return self._sum(value, group)

    @method(dispatch=PerRank("gate"), concurrency=2)
    async def fail_soon(self, gate: Address | None) -> None:
        """Raise on each rank that has a gate once the gate is open, while other calls run concurrently."""
        if gate is not None:
            await pass_gate_async(gate)
            raise ValueError(f"rank {self.ctx.rank} has failed")

    @method(dispatch=PerRank("gate"), concurrency=2)
    async def sum_soon(self, gate: Address | None) -> float:
        """Sum over the ranks. A rank with a gate asks for the process group only when the gate is open."""
        if gate is not None:
            await pass_gate_async(gate)
        return self._sum(1.0, self.ctx.process_group())

    @method
    def keep_group(self) -> float:
        self.stored_group = self.ctx.process_group()
        return self._sum(1.0, self.stored_group)

    @method
    def forget_group(self) -> None:
        self.stored_group = None

    @method
    def sum_kept(self, failing: int | None = None, gate: Address | None = None) -> float:
        """Sum in the stored process group. A failure there fails the whole group, because the role has no `renew`."""
        return self._sum_unless(failing, self.stored_group, gate)

    def _sum_unless(self, failing: int | None, group: ProcessGroup | None, gate: Address | None) -> float:
        """Wait at the gate on all ranks, so that all have begun the call, then raise on rank `failing` or sum."""
        if gate is not None:
            pass_gate(gate)
        if self.ctx.rank == failing:
            raise ValueError(f"rank {failing} left before the collective")
        return self._sum(1.0, group)

    def _sum(self, value: float, group: ProcessGroup | None) -> float:
        import torch.distributed as dist

        tensor = torch.tensor([value], device=self.ctx.device)
        dist.all_reduce(tensor, group=group)
        return float(tensor)
