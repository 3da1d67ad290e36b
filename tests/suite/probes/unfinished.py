"""Roles whose calls end amid a step, with unreduced gradients or pending operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colocate import Role, method, needs
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = import_optional("torch")

_FEATURES = 256
_MIB = 2**20


@needs("process_group")
class Accumulating(Role):
    """A role with an FSDP2 model that accumulates gradients, and reduces in another dtype."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        self.net: Any = torch.nn.Linear(_FEATURES, _FEATURES, bias=False)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(self.net, mesh=self.ctx.device_mesh(), mp_policy=policy)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.cache = torch.ones(_MIB)

    @method
    def accumulate(self, number: int, last: bool) -> None:
        """Add one batch's gradients; the last batch reduces the sum."""
        generator = torch.Generator().manual_seed(2 * number + self.ctx.rank)
        self.net.set_requires_gradient_sync(last)
        self.net(torch.randn(4, _FEATURES, generator=generator)).float().square().mean().backward()

    @method
    def update(self) -> Tensor:
        """Update the weights, drop the gradients, and return this rank's weights."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        shard: Tensor = self.net.weight.to_local().detach().clone()
        return shard


class Hooked(Role):
    """A role with a hooked model, whose steps take two calls with an autograd graph between."""

    def __init__(self) -> None:
        device = self.ctx.device
        self.net = torch.nn.Sequential(
            torch.nn.Linear(_FEATURES, _FEATURES, device=device),
            torch.nn.Tanh(),
            torch.nn.Linear(_FEATURES, _FEATURES, device=device),
        )
        generator = torch.Generator(device).manual_seed(0)
        for parameter in self.net.parameters():
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        first: Any = self.net[0]
        last: Any = self.net[2]
        self.hook_calls: list[str] = []
        self.net.register_forward_pre_hook(lambda *_: self._record_hook("forward begins"))
        self.net.register_forward_hook(lambda *_: self._record_hook("forward ends"))
        self.net.register_full_backward_hook(lambda *_: self._record_hook("backward ends"))
        first.weight.register_hook(self._clip)
        # This hook uses each gradient as soon as it is computed, to save memory.
        self.at_once = torch.optim.Adam(last.parameters(), lr=0.1)
        last.weight.register_post_accumulate_grad_hook(self._update)
        self.optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
        self.optimizer.register_step_post_hook(lambda *_: self._record_hook("step"))
        self.loss: Any = None

    @method
    def begin(self, number: int) -> float:
        generator = torch.Generator().manual_seed(2 * number + self.ctx.rank)
        batch = torch.randn(4, _FEATURES, generator=generator).to(self.ctx.device).requires_grad_()
        self.loss = self.net(batch).square().mean()
        return float(self.loss.detach())

    @method
    def end(self) -> tuple[list[Tensor], list[str]]:
        """Run the backward pass and the step; return the weights and the hook calls."""
        self.loss.backward()
        self.loss = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in self.net.parameters()], self.hook_calls

    def _record_hook(self, what: str) -> None:
        self.hook_calls.append(what)

    def _clip(self, gradient: Tensor) -> Tensor:
        self._record_hook("gradient")
        return gradient.clamp(-1e-3, 1e-3)

    def _update(self, weight: Tensor) -> None:
        self._record_hook("update")
        self.at_once.step()
        weight.grad = None


@needs("process_group")
class Unfinished(Role):
    """A role that begins operations, and waits for their ends in a later call."""

    def __init__(self, mib: int) -> None:
        self.values = torch.ones(mib * _MIB // 4)
        self.works: list[Any] = []

    @method
    def begin_sum(self, gate: Address | None = None, fails: bool = False) -> None:
        """Begin a sum over the ranks; the last rank joins, or raises, once a gate is open."""
        import torch.distributed as dist

        group = self.ctx.process_group()
        if gate is not None and self.ctx.rank == self.ctx.world_size - 1:
            pass_gate(gate)
            if fails:
                raise ValueError("a bad batch")
        self.values.fill_(1.0 + self.ctx.rank)
        self.works = [dist.all_reduce(self.values, group=group, async_op=True)]

    @method
    def end(self) -> tuple[float, float]:
        """Wait for all begun operations; return the least and the greatest value."""
        while self.works:
            self.works.pop().wait()
        return float(self.values.min()), float(self.values.max())

    def renew(self) -> None:
        self.works.clear()
