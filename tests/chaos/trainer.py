"""The training role: a small model, sharded by FSDP2 over all slots of a group, with failures at given places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.machine import Deliberate, Machine, Seen

from colocate import Gather, method, needs

if TYPE_CHECKING:
    import torch

RATE, ROWS, FEATURES = 0.05, 6, 4


def make_net() -> torch.nn.Sequential:
    """Return a model, the same in each process. In doubles, shards change only the last digits of results."""
    import torch

    torch.manual_seed(0)
    parts = torch.nn.Linear(FEATURES, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)  # not all of these divide by 2 or 3
    return torch.nn.Sequential(*parts).double()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and their targets for the update after `number` updates; two or three ranks share the rows."""
    import torch

    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return x, x.sum(dim=1, keepdim=True).sin()


@needs("process_group")
class Trainer(Machine):
    """A role whose trained state is in the weights and in Adam's state alone: each rank has its shards."""

    def __init__(self, main: str) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        super().__init__(main=main)
        mesh = self.ctx.device_mesh()
        self.net: Any = make_net()
        for part in (self.net[0], self.net[2]):
            fully_shard(part, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=RATE)

    def renew(self) -> None:
        from colocate.torch import renew

        renew(self.net, self.optimizer, self.ctx)

    @method(collect=Gather())
    def train(self, ident: int, failing: Sequence[int], where: str) -> Seen:
        """Make one update, unless this rank has to raise; return the number of updates, and the loss before."""
        self._note(ident)
        self.optimizer.zero_grad()
        x, y = (rows[self.ctx.rank :: self.ctx.world_size] for rows in batch(self._updates()))

        def fail_if(here: str) -> None:
            if where == here and self.ctx.rank in failing:
                raise Deliberate(ident, self.ctx.rank)

        fail_if("before")
        loss = self._forward_and_backward(x, y, lambda *_: fail_if("backward"))
        fail_if("after")
        self.optimizer.step()
        return self._seen((self._updates(), float(loss)))

    def _forward_and_backward(self, x: torch.Tensor, y: torch.Tensor, hook: Callable[..., None]) -> torch.Tensor:
        """Return the loss; the hook runs between the collectives of the last part and those of the first one."""
        handle = self.net[1].register_full_backward_hook(hook)
        try:
            loss: torch.Tensor = ((self.net(x) - y) ** 2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        finally:
            handle.remove()

    def _updates(self) -> int:
        """Return Adam's count of updates, which is the same for each parameter."""
        (found,) = {int(state["step"]) for state in self.optimizer.state.values()} or {0}
        return found

    def save(self, directory: str) -> None:
        import torch

        super().save(directory)

        saved = [
            (_shard(weights), {name: _shard(value) for name, value in self.optimizer.state.get(weights, {}).items()})
            for weights in self.net.parameters()
        ]
        torch.save(saved, Path(directory, f"{self.ctx.rank}.pt"))

    def restore(self, directory: str) -> None:
        import torch
        from torch.distributed.tensor import DTensor

        super().restore(directory)
        saved = torch.load(Path(directory, f"{self.ctx.rank}.pt"))
        for weights, (shard, state) in zip(self.net.parameters(), saved, strict=True):
            _shard(weights).copy_(shard)
            place = weights.device_mesh, weights.placements
            size: dict[str, Any] = {"shape": weights.shape, "stride": weights.stride()}
            if state:  # there was an update
                self.optimizer.state[weights] = {
                    name: value if name == "step" else DTensor.from_local(value, *place, **size)
                    for name, value in state.items()
                }


def _shard(value: Any) -> torch.Tensor:
    found: torch.Tensor = (value.to_local() if hasattr(value, "to_local") else value).detach()
    return found
