"""What `group.memory()` costs the worker: CPU time beside the same for roles that hold nothing.

Milliseconds are the machine's as well, so beside it there is a walk by hand, which knows where to look.
"""

from __future__ import annotations

import abc
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from tests.bench.rows import Row

import colocate
from colocate import Role, method

_PART = "group.memory() of 1,000 tensors, CPU time beside that of an empty role"
_BESIDE = "the same beside a walk by hand over modules and optimizer"
_CALLS = "calls of a process, while somebody asks once a second for its memory"
_LOOKS = 200
_ROUNDS = 10
_CALLS_OF_A_SECOND = 5000
_LAYERS = 100


class Nothing(Role):
    """An empty one."""

    @method
    def nothing(self) -> None:
        """A role has a method."""


class Something(Nothing, abc.ABC):
    """One that has tensors."""

    tensors = 1000

    @abc.abstractmethod
    def all(self) -> Iterable[torch.Tensor]:
        """They, by a walk by hand."""

    def by_hand(self) -> dict[int, int]:
        """The sizes of their storages."""
        sizes = {}
        for tensor in self.all():
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return sizes


class Tensors(Something):
    """A thousand of them in a list."""

    def all(self) -> Iterable[torch.Tensor]:
        """They, by a walk by hand."""
        return self.held

    def __init__(self) -> None:
        self.held = [torch.zeros(2) for _ in range(self.tensors)]


class Layers(Something):
    """As many in the smallest of modules."""

    def all(self) -> Iterable[torch.Tensor]:
        """They, by a walk by hand."""
        return _tensors_of(self.net)

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


class Trained(Something):
    """A model in the shape of a Llama, with its gradients and AdamW's state."""

    tensors = 9 * _LAYERS * 5

    def all(self) -> Iterable[torch.Tensor]:
        """They, by a walk by hand."""
        yield from _tensors_of(self.net)
        for state in self.optimizer.state.values():
            yield from state.values()

    def __init__(self) -> None:
        self.net = torch.nn.Sequential(*[_Block() for _ in range(_LAYERS)])
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.net(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()


def rows() -> Iterator[Row]:
    """In turns, so that all have the quiet moments."""
    roles: dict[str, type[Something]] = {
        "a list of them": Tensors,
        "two in each of 500 modules": Layers,
        "a Llama's, trained by AdamW": Trained,
    }
    kinds: list[type[Nothing]] = [Nothing, *roles.values()]
    with colocate.connect() as runtime:
        groups = {kind: runtime.reserve(1).spawn({"role": colocate.role(kind)}) for kind in kinds}
        like = {role: role() for role in roles.values()}
        looks: dict[object, Callable[[], object]] = {role: group.memory for role, group in groups.items()}
        looks |= {instance: instance.by_hand for instance in like.values()}
        least = dict.fromkeys(looks, math.inf)
        for _ in range(_LOOKS):
            for each, look in looks.items():
                least[each] = min(least[each], _seconds(look))
    for name, role in roles.items():
        yield Row(_PART, name, (least[role] - least[Nothing]) * 1e3 / (role.tensors / 1000), "ms", 1.0)
    for name, role in roles.items():
        yield Row(_BESIDE, name, (least[role] - least[Nothing]) / least[like[role]], "x")
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


def _seconds(look: Callable[[], object]) -> float:
    began = time.process_time()
    look()
    return time.process_time() - began


def _tensors_of(net: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in net.modules():
        for parameter in module.parameters(recurse=False):
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from module.buffers(recurse=False)
