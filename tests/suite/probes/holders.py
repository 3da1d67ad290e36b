"""Roles that hold memory."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import colocate
from colocate import Role, method
from colocate.testing.gate import Address, pass_gate
from colocate.testing.probes import import_optional
from colocate.testing.probes.holders import _MIB

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = import_optional("torch")


class WatchedHolder(Role):
    """A role with a gradient, which records the threads that read the gradient."""

    def __init__(self) -> None:
        grad: Any = inspect.getattr_static(torch.Tensor, "grad")
        readers = self._readers = set[int]()

        def read(parameter: Tensor) -> Any:
            readers.add(threading.get_ident())
            return grad.__get__(parameter)

        watched: Any = type("Watched", (torch.nn.Parameter,), {"grad": property(read, grad.__set__)})
        self.weight: Any = watched(torch.ones(1000, device=self.ctx.device))

    @method
    def train(self) -> None:
        self.weight.sum().backward()

    @method
    def let_go(self, gate: Address) -> None:
        """Drop the gradient, then wait until a gate is opened."""
        self.weight.grad = None
        pass_gate(gate)

    def sleep(self, tags: Sequence[str]) -> None:
        self.weight.grad = None

    def wake(self, tags: Sequence[str]) -> None:
        """Do nothing."""

    @method
    def read_elsewhere(self) -> bool:
        """Return whether a thread other than the lane has read the gradient."""
        return bool(self._readers - {threading.get_ident()})


class Training(Role):
    """A role with a transformer and its Adam optimizer."""

    def __init__(self, mib: int) -> None:
        self.width = width = 64 * max(1, round(mib**0.5))
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        layers = max(1, round(mib * _MIB / (48 * width * width)))
        self.net = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(self.ctx.device)
        self.optimizer = torch.optim.Adam(self.net.parameters())

    @method
    def train(self, steps: int) -> int:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.net(torch.ones(4, 32, self.width, device=self.ctx.device)).square().mean().backward()
            self.optimizer.step()
        return sum(parameter.nbytes for parameter in self.net.parameters())


class Declarer(Role):
    """A role that declares its own device memory."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails
        hidden = torch.zeros(1000, device=self.ctx.device)
        self._hidden: Callable[[], Tensor] = lambda: hidden

    @method
    def nothing(self) -> None:
        """Do nothing: a role needs a method."""

    def device_state(self) -> dict[str, Tensor]:
        """Return the tensor of a closure, which no search finds."""
        if self._fails:
            raise ValueError(f"rank {colocate.context().rank} can't say")
        return {"hidden": self._hidden()}
