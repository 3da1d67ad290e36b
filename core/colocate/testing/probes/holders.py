"""A role that holds memory for weights, gradients and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colocate import Role, method
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes import import_optional

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = import_optional("torch")

_MIB = 2**20


class Holding(Role):
    """A role with a model of one matrix, and with an optimizer after the first training step."""

    def __init__(self, mib: int = 1) -> None:
        self.net = torch.nn.Linear(mib * _MIB // 4096, 1024, bias=False, device=self.ctx.device)
        self.net.register_buffer("scale", torch.ones(1024, device=self.ctx.device))
        self.optimizer: Any = None
        self.declares = False

    @method
    def train(self) -> None:
        """Run one training step, which creates the gradients and the optimizer's state."""
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.net(torch.ones(1, self.net.in_features, device=self.ctx.device)).sum().backward()
        self.optimizer.step()

    @method
    def make(self, elements: int) -> Tensor:
        return torch.zeros(elements, device=self.ctx.device)

    @method
    def weights(self) -> Tensor:
        return self.net.weight.detach()

    @method
    def share(self, other: str) -> None:
        self.net = self.ctx.sibling(other, Holding).net

    @method
    def wait_at(self, gate: Address) -> None:
        pass_gate(gate)
