"""Roles that end a call amid a step: with gradients that aren't reduced yet, or operations that aren't done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colocate import Role, method, needs
from colocate.testing.gate import Address, pass_gate

if TYPE_CHECKING:
    from torch import Tensor

_FEATURES = 256
_MIB = 2**20


@needs("process_group")
class Accumulating(Role):
    """A model of FSDP2 whose gradients are reduced in another dtype than they are made in, over some batches."""

    def __init__(self) -> None:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        self.net: Any = torch.nn.Linear(_FEATURES, _FEATURES, bias=False)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(self.net, mesh=self.ctx.device_mesh(), mp_policy=policy)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.cache = torch.ones(_MIB)

    @method
    def accumulate(self, number: int, last: bool) -> None:
        """Gradients of one batch more; the last one has them reduced."""
        import torch

        generator = torch.Generator().manual_seed(2 * number + self.ctx.rank)
        self.net.set_requires_gradient_sync(last)
        self.net(torch.randn(4, _FEATURES, generator=generator)).float().square().mean().backward()

    @method
    def update(self) -> Tensor:
        """The weights of this rank after an update, and no gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        shard: Tensor = self.net.weight.to_local().detach().clone()
        return shard


@needs("process_group")
class Unfinished(Role):
    """Begins operations, and waits for them in a later call."""

    def __init__(self, mib: int) -> None:
        import torch

        self.values = torch.ones(mib * _MIB // 4)
        self.works: list[Any] = []

    @method
    def begin_sum(self, gate: Address | None = None, fails: bool = False) -> None:
        """Begin to sum up what the ranks have; the last one when a gate is open, or it raises then."""
        import torch.distributed as dist

        group = self.ctx.process_group()
        if gate is not None and self.ctx.rank == self.ctx.world_size - 1:
            pass_gate(gate)
            if fails:
                raise ValueError("a bad batch")
        self.values.fill_(1.0 + self.ctx.rank)
        self.works = [dist.all_reduce(self.values, group=group, async_op=True)]

    @method
    def begin_exchange(self) -> None:
        """Begin to send what it has to the other rank, and to receive what that has."""
        import torch.distributed as dist

        group = self.ctx.process_group()
        other = dist.get_global_rank(group, 1 - self.ctx.rank)
        sent = self.values.fill_(1.0 + self.ctx.rank).clone()
        self.works = [dist.isend(sent, other, group), dist.irecv(self.values, other, group)]

    @method
    def end(self) -> tuple[float, float]:
        """Wait for all that was begun: the least and the greatest of what it has then."""
        while self.works:
            self.works.pop().wait()
        return float(self.values.min()), float(self.values.max())

    def renew(self) -> None:
        """It keeps nothing of the groups that were cut."""
        self.works.clear()
