"""What `group.memory()` costs the worker: CPU time beside the same for a role that holds nothing."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Iterator

import torch
from tests.bench.rows import Row

import colocate
from colocate import Role, method

_PART = "group.memory() of 1,000 tensors, CPU time beside that of an empty role"
_CALLS = "calls of a process, while somebody asks once a second for its memory"
_LOOKS = 200
_ROUNDS = 10
_CALLS_OF_A_SECOND = 5000
_LAYERS = 100


class Nothing(Role):
    tensors = 0

    @method
    def nothing(self) -> None:
        """A role has a method."""


class Layers(Nothing):
    """A thousand tensors in the smallest of modules."""

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
    names: dict[type[Nothing], str] = {Layers: "two in each of 500 modules", Trained: "a Llama's, trained by AdamW"}
    least = {Nothing: math.inf, **dict.fromkeys(names, math.inf)}
    with colocate.connect() as runtime:
        groups = {kind: runtime.reserve(1).spawn({"role": colocate.role(kind)}) for kind in least}
        for _ in range(_LOOKS):
            for kind, group in groups.items():
                began = time.process_time()
                group.memory()
                least[kind] = min(least[kind], time.process_time() - began)
    for kind, name in names.items():
        yield Row(_PART, name, (least[kind] - least[Nothing]) * 1e3 / (kind.tensors / 1000), "ms", 1.0)
    yield Row(_CALLS, "beside nobody", _beside_looks(), "x", 1.02)


def _beside_looks() -> float:
    """How long about a second of calls takes, beside as many while nobody asks; in turns."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"role": colocate.role(Layers)})
        view = group.role("role", Layers)
        for asked in [False, True] * _ROUNDS:
            asking = threading.Thread(target=group.memory)
            began = time.perf_counter()
            if asked:
                asking.start()
            for _ in range(_CALLS_OF_A_SECOND):
                view.nothing()
            took[asked].append(time.perf_counter() - began)
            if asked:
                asking.join()
    return statistics.median(took[True]) / statistics.median(took[False])
