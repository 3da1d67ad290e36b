"""`sync_weights` of 1 GB into a module of the same slot, of other slots, out of shards; beside as many bytes copied."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from tests.bench.rows import Row

import colocate
from colocate import ColocatedGroup, Role, Weights, method

_GB = 1 << 30
_WIDTH = 2048
_ROUNDS = 7
_HERE = "sync_weights of 1 GB in a slot"
_SHARDED = "sync_weights of 1 GB by FSDP2 on 2 ranks to whole models in their slots"
_BETWEEN = "sync_weights of 1 GB from 2 slots of a group"


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        count = _GB // (4 * _WIDTH * _WIDTH)
        self.layers = torch.nn.ParameterList([torch.empty(_WIDTH, _WIDTH).fill_(1.0) for _ in range(count)])


class Source(Role):
    """Has 1 GB of weights."""

    def __init__(self, sharded: bool = False) -> None:
        torch.set_num_threads(1)
        self.net = _Model()
        if sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.ctx.device_mesh())

    def named_weights(self) -> object:
        return colocate.torch.named_weights(self.net)

    @method
    def gather(self) -> float:
        """Seconds in which torch gathers all by itself."""
        start = time.perf_counter()
        for shard in self.net.state_dict().values():
            shard.full_tensor()
        return time.perf_counter() - start


class Target(Role):
    """Has as many."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.net = _Model()

    def load_weights(self, weights: Weights, version: int) -> None:
        colocate.torch.load_weights(self.net, weights)

    @method
    def copy(self) -> float:
        """Seconds in which as much is copied within the model's memory, from the first half to the other and back."""
        start = time.perf_counter()
        layers = list(self.net.layers)
        half = len(layers) // 2
        with torch.no_grad():
            for one, other in zip(layers[:half], layers[half:], strict=True):
                other.copy_(one)
            for one, other in zip(layers[:half], layers[half:], strict=True):
                one.copy_(other)
        return time.perf_counter() - start

    @method
    def copy_source(self) -> float:
        """Seconds in which as much is copied into the model from the memory that a sync copies it from."""
        source = self.ctx.sibling("source", Source).net
        start = time.perf_counter()
        with torch.no_grad():
            for one, other in zip(source.layers, self.net.layers, strict=True):
                other.copy_(one)
        return time.perf_counter() - start

    @method
    def most(self) -> int:
        """The bytes that the process has had at most."""
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Sharer(Target):
    """Has the source's."""

    @method(shares=True)
    def load_weights(self, weights: Weights, version: int) -> None:  # type: ignore[override]
        colocate.torch.load_weights(self.net, weights)


def rows() -> Iterator[Row]:
    """Times beside copies, and memory above both models."""
    with colocate.connect("local", processes=True) as runtime:
        yield from _here(runtime)
        yield from _sharded(runtime)
        yield from _between(runtime)


def _here(runtime: colocate.Runtime) -> Iterator[Row]:
    with runtime.reserve() as pool:
        group = pool.spawn({"source": colocate.role(Source), "target": colocate.role(Target)})
        source, target = group.role("source", Source), group.role("target", Target)
        before = target.most()[0]
        took = _beside(lambda: colocate.sync_weights(source, target).seconds, lambda: target.copy_source()[0])
        yield Row(_HERE, "to one copy of as many bytes", took, "x", 1.1)
        yield Row(_HERE, "memory above both models", (target.most()[0] - before) / 2**20, "MiB", 256)
    with runtime.reserve() as pool:
        group = pool.spawn({"source": colocate.role(Source), "target": colocate.role(Sharer)})
        source, target = group.role("source", Source), group.role("target", Sharer)
        colocate.sync_weights(source, target)
        seconds = [_timed(lambda: colocate.sync_weights(source, target)) for _ in range(_ROUNDS)]
        yield Row(_HERE, "the same tensors", statistics.median(seconds) * 1e3, "ms", 5)
        yield Row(_HERE, "the same tensors, bytes of its own", _own(group), "B", 0)


def _sharded(runtime: colocate.Runtime) -> Iterator[Row]:
    with runtime.reserve(2) as pool:
        group = pool.spawn({"source": colocate.role(Source, sharded=True), "target": colocate.role(Target)})
        source, target = group.role("source", Source), group.role("target", Target)
        colocate.sync_weights(source, target)
        before = max(target.most())
        took = _beside(lambda: colocate.sync_weights(source, target).seconds, lambda: max(source.gather()))
        yield Row(_SHARDED, "to the all-gather alone", took, "x", 1.3)
        yield Row(_SHARDED, "memory above both models", (max(target.most()) - before) / 2**20, "MiB", 512)


def _between(runtime: colocate.Runtime) -> Iterator[Row]:
    with runtime.reserve(2) as pool, runtime.reserve(1) as one, runtime.reserve(3) as three:
        source = pool.spawn({"source": colocate.role(Source)}).role("source", Source)
        for count, others in ((1, one), (3, three)):
            target = others.spawn({"target": colocate.role(Target)}).role("target", Target)
            sync = partial(colocate.sync_weights, source, target)
            took = _beside(lambda sync=sync: sync().seconds, lambda target=target: max(target.copy()))  # type: ignore[misc]
            yield Row(_BETWEEN, f"to {count} of another, to copies of as many bytes there", took, "x", 1.5)


def _own(group: ColocatedGroup) -> int:
    return sum(role.total for slot in group.memory().slots for role in slot.roles if role.role == "target")


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _beside(sync: Callable[[], float], alone: Callable[[], float]) -> float:
    """The median of the rounds' ratios."""
    pairs = [(sync(), alone()) for _ in range(_ROUNDS)]
    return statistics.median(mine / its for mine, its in pairs)
