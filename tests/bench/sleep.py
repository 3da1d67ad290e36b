"""Sleep and wake of a role's memory, beside a copy of the same size into a mapped file that is in memory."""

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
_SIDE = 9216  # the one matrix has a third of a gigabyte
_FOLDER = "/var/tmp"


class Trained(Role):
    def __init__(self) -> None:
        self.net = torch.nn.Linear(_SIDE, _SIDE, bias=False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), foreach=False)
        self.net(torch.ones(1, _SIDE)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.nbytes = 3 * self.net.weight.nbytes
        file = tempfile.TemporaryFile(dir=_FOLDER)  # noqa: SIM115 - it is there as long as the role
        file.truncate(self.nbytes)
        # The role's own memory has another layout after a sleep, which copies faster. No attribute refers to this one.
        plain = torch.ones(self.nbytes // 4)
        self.plain = lambda: plain
        self.mapped = torch.frombuffer(mmap.mmap(file.fileno(), self.nbytes), dtype=torch.float32)

    @method(collect=First())
    def write(self) -> None:
        """Write into all memory, as a step does."""
        (state,) = self.optimizer.state.values()
        for tensor in (self.net.weight.detach(), state["exp_avg"], state["exp_avg_sq"]):
            tensor.mul_(1.0)

    @method(collect=First())
    def copy(self) -> float:
        """Return the seconds of a copy into the file."""
        began = time.perf_counter()
        self.mapped.copy_(self.plain())
        return time.perf_counter() - began

    @method(awake=(), collect=First())
    def resident(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    @method(collect=First())
    def size(self) -> int:
        return self.nbytes


def rows() -> Iterator[Row]:
    """Yield the times of a copy, a sleep and a wake, in turns, of memory that was just written."""
    copies, sleeps, wakes = [], [], []
    with (
        colocate.connect(processes=True, spill_dir=_FOLDER) as runtime,
        runtime.reserve(1) as pool,
        pool.spawn({"trained": colocate.role(Trained)}) as group,
    ):
        trained = group.role("trained", Trained)
        size = trained.size()
        trained.copy()
        group.sleep("trained")  # from now on the file is allocated on disk and in memory
        for _ in range(_ROUNDS):
            trained.write()
            copies.append(trained.copy())
            for move, seconds in ((group.sleep, sleeps), (group.wake, wakes)):
                began = time.perf_counter()
                move("trained")
                seconds.append(time.perf_counter() - began)
        trained.write()
        before = trained.resident()
        group.sleep("trained")
        freed = before - trained.resident()
    ratios = [(two + three) / (2 * one) for one, two, three in zip(copies, sleeps, wakes, strict=True)]
    for name, found in (("a copy into a mapped file", copies), ("sleep", sleeps), ("wake", wakes)):
        yield Row(_PART, name, statistics.median(found) * 1e3, "ms")
    yield Row(_PART, "both beside two copies", statistics.median(ratios), "x", 1 / 0.85)
    yield Row(_PART, "of the role's bytes, what stays in memory", 1 - freed / size, "x", 0.02)
