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
    """Has a gradient, and knows who reads it."""

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
        """Let go of the value; then wait until a gate is opened."""
        self.weight.grad = None
        pass_gate(gate)

    def sleep(self, tags: Sequence[str]) -> None:
        self.weight.grad = None

    def wake(self, tags: Sequence[str]) -> None:
        """Stay as it is."""

    @method
    def read_elsewhere(self) -> bool:
        """Whether another thread than that of role code has read it."""
        return bool(self._readers - {threading.get_ident()})


class Training(Role):
    """Has a transformer, and Adam for it."""

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
    """Says itself what it holds."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails
        hidden = torch.zeros(1000, device=self.ctx.device)
        self._hidden: Callable[[], Tensor] = lambda: hidden

    @method
    def nothing(self) -> None:
        """A role has a method."""

    def device_state(self) -> dict[str, Tensor]:
        """Return what is in its function's closure, where nobody looks."""
        if self._fails:
            raise ValueError(f"rank {colocate.context().rank} can't say")
        return {"hidden": self._hidden()}
