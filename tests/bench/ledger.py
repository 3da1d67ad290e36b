"""What `group.memory()` costs the worker: CPU time beside the same for roles that hold nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from tests.bench.rows import Row

import colocate
from colocate import Role, method

_PART = "group.memory() of 1,000 tensors, CPU time beside that of an empty role"
_LOOKS = 200
_LAYERS = 100


class Nothing(Role):
    """An empty one."""

    @method
    def nothing(self) -> None:
        """A role has a method."""


class Tensors(Nothing):
    """A thousand of them in a list."""

    tensors = 1000

    def __init__(self) -> None:
        self.held = [torch.zeros(2) for _ in range(self.tensors)]


class Layers(Nothing):
    """As many in the smallest of modules."""

    tensors = 1000

    def __init__(self) -> None:
        self.net = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(self.tensors // 2)])


class _Block(torch.nn.Module):
    """The modules of a Llama's layer, so that there are as many of them for each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(4)])
        self.mlp = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(3)])
        self.act, self.before, self.after = torch.nn.SiLU(), torch.nn.RMSNorm(4), torch.nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [self.before, *self.attention, self.after, *self.mlp, self.act]:
            x = layer(x)
        return x


class Trained(Nothing):
    """A model in the shape of a Llama, with its gradients and AdamW's state."""

    tensors = 9 * _LAYERS * 5

    def __init__(self) -> None:
        self.net = torch.nn.Sequential(*[_Block() for _ in range(_LAYERS)])
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.net(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()


def rows() -> Iterator[Row]:
    """In turns, so that all have the quiet moments."""
    roles = {"a list of them": Tensors, "two in each of 500 modules": Layers, "a Llama's, trained by AdamW": Trained}
    with colocate.connect() as runtime:
        groups = {role: runtime.reserve(1).spawn({"role": colocate.role(role)}) for role in (Nothing, *roles.values())}
        least = dict.fromkeys(groups, math.inf)
        for _ in range(_LOOKS):
            for role, group in groups.items():
                began = time.process_time()
                group.memory()
                least[role] = min(least[role], time.process_time() - began)
    for name, role in roles.items():
        yield Row(_PART, name, (least[role] - least[Nothing]) * 1e3 / (role.tensors / 1000), "ms", 1.0)
