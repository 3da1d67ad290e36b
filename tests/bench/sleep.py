"""Memory of a role that sleeps and wakes, beside a copy of the same size to a file that is mapped and in memory."""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.bench.rows import Row

import colocate
from colocate import First, Role, method

_PART = "sleep and wake of 1 GB of parameters and Adam's state"
_ROUNDS = 9
_SIDE = 9216  # of the one matrix: a third of a gigabyte
_FOLDER = "/var/tmp"


class Trained(Role):
    """A model of one matrix that has trained; other memory and a file of its size."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(_SIDE, _SIDE, bias=False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), foreach=False)
        self.net(torch.ones(1, _SIDE)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.nbytes = 3 * self.net.weight.nbytes
        file = tempfile.TemporaryFile(dir=_FOLDER)  # noqa: SIM115 - it is there as long as the role
        file.truncate(self.nbytes)
        # Its own has another layout once it has slept, from which a copy is faster. No attribute leads to this one.
        plain = torch.ones(self.nbytes // 4)
        self.plain = lambda: plain
        self.mapped = torch.frombuffer(mmap.mmap(file.fileno(), self.nbytes), dtype=torch.float32)

    def _all(self) -> list[torch.Tensor]:
        (state,) = self.optimizer.state.values()
        return [self.net.weight.detach(), state["exp_avg"], state["exp_avg_sq"]]

    @method(collect=First())
    def write(self) -> float:
        """Write into all of it, as a step does; how long that takes."""
        began = time.perf_counter()
        for tensor in self._all():
            tensor.mul_(1.0)
        return time.perf_counter() - began

    @method(collect=First())
    def copy(self) -> float:
        """How long a copy into the file takes."""
        began = time.perf_counter()
        self.mapped.copy_(self.plain())
        return time.perf_counter() - began

    @method(awake=(), collect=First())
    def resident(self) -> int:
        """The memory of the process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    @method(collect=First())
    def size(self) -> int:
        """How much it has."""
        return self.nbytes


class Frozen(Role):
    """A model of that size that doesn't train."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(_SIDE, 3 * _SIDE, bias=False).requires_grad_(False)

    @method
    def read(self) -> float:
        """Read all of it."""
        return float(self.net.weight.sum())


def rows() -> Iterator[Row]:
    """In turns: a copy, a sleep and a wake of what was written before, and the next time that it is written."""
    copies, sleeps, wakes, first, second, frozen = [], [], [], [], [], []
    with (
        colocate.connect(processes=True, spill_dir=_FOLDER) as runtime,
        runtime.reserve(1) as pool,
        pool.spawn({"trained": colocate.role(Trained)}) as group,
    ):
        trained = group.role("trained", Trained)
        size = trained.size()
        trained.copy()
        group.sleep("trained")  # the file has its place on the disk, and in memory
        for _ in range(_ROUNDS):
            trained.write()
            copies.append(trained.copy())
            sleeps.append(_seconds(group, "sleep"))
            wakes.append(_seconds(group, "wake"))
            first.append(trained.write())
            second.append(trained.write())
        before = trained.resident()
        group.sleep("trained")
        freed = before - trained.resident()
    with (
        colocate.connect(processes=True, spill_dir=_FOLDER) as runtime,
        runtime.reserve(1) as pool,
        pool.spawn({"frozen": colocate.role(Frozen)}) as group,
    ):
        for _ in range(_ROUNDS):
            group.role("frozen", Frozen).read()
            frozen.append(_seconds(group, "sleep"))
    copy, sleep, wake = (statistics.median(each) for each in (copies, sleeps, wakes))
    extras = [one - other for one, other in zip(first, second, strict=True)]
    rounds = list(zip(copies, sleeps, wakes, extras, strict=True))
    ratios = [(two + three) / (2 * one) for one, two, three, _ in rounds]
    wholes = [(two + three + four) / (2 * one) for one, two, three, four in rounds]
    yield Row(_PART, "a copy into a mapped file", copy * 1e3, "ms")
    yield Row(_PART, "sleep", sleep * 1e3, "ms")
    yield Row(_PART, "wake", wake * 1e3, "ms")
    yield Row(_PART, "both beside two copies", statistics.median(ratios), "x", 1 / 0.85)
    yield Row(_PART, "of the role's bytes, what stays in memory", 1 - freed / size, "x", 0.02)
    yield Row(_PART, "sleep of a frozen model that has slept before", statistics.median(frozen[1:]) * 1e3, "ms")
    yield Row(_PART, "what the first step after a wake takes longer", statistics.median(extras) * 1e3, "ms")
    yield Row(_PART, "sleep, wake and that beside two copies", statistics.median(wholes), "x")


def _seconds(group: colocate.ColocatedGroup, what: str) -> float:
    (role,) = group.roles
    began = time.perf_counter()
    getattr(group, what)(role)
    return time.perf_counter() - began
