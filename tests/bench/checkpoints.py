"""What a step waits for a checkpoint of 1 GB a rank: all of it is written, or one copy of the state is made."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.bench.rows import Row

import colocate
from colocate import Reduce, Role, method
from colocate.torch import host_copy

_PART = "a checkpoint of 1 GB on each of 2 ranks"
_ROUNDS = 5
_SIDE = 9216  # of the one matrix: a third of a gigabyte
_FOLDER = "/var/tmp"


class Learner(Role):
    """Has a matrix and Adam's state, and writes both in two halves."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(_SIDE, _SIDE, bias=False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), foreach=False)
        self.net(torch.ones(1, _SIDE)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    @method(collect=Reduce("max"))
    def copy(self) -> float:
        """How long a copy of the state takes."""
        began = time.perf_counter()
        host_copy(self.state)
        return time.perf_counter() - began

    @method(collect=Reduce("max"))
    def step(self) -> float:
        """A small one."""
        self.net.weight.data[:64] += 1.0
        return 0.0

    def save(self, directory: str) -> Iterator[None]:
        taken = host_copy(self.state)
        yield
        torch.save(taken, Path(directory, f"{self.ctx.rank}.pt"))

    def restore(self, directory: str) -> None:
        """It goes on from nothing here."""


def rows() -> Iterator[Row]:
    """In turns: a copy, a checkpoint that waits, and one beside steps."""
    copies, waiting, stopped, written = [], [], [], []
    equal = True
    with (
        tempfile.TemporaryDirectory(dir=_FOLDER) as name,
        colocate.connect(processes=True) as runtime,
        runtime.reserve(2) as pool,
        pool.spawn({"learner": colocate.role(Learner)}) as group,
    ):
        folder, learner = Path(name), group.role("learner", Learner)
        for number in range(_ROUNDS + 1):
            copies.append(learner.copy())
            began = time.perf_counter()
            group.checkpoint(folder / "waiting", tag=0)
            waiting.append(time.perf_counter() - began)
            began = time.perf_counter()
            saving = group.checkpoint(folder / "beside", tag=0, wait=False)
            stopped.append(time.perf_counter() - began)
            while not saving.done():
                learner.step()
            saving.result()
            written.append(time.perf_counter() - began)
            equal = equal and _files(folder / "waiting") == _files(folder / "beside")
            if not number:  # what is made once
                for each in (copies, waiting, stopped, written):
                    each.clear()
    ratios = [two / one for one, two in zip(copies, stopped, strict=True)]
    named = {"a copy of the state": copies, "one that waits": waiting, "one beside steps": written}
    for what, found in {**named, "which stops them for": stopped}.items():
        yield Row(_PART, what, statistics.median(found) * 1e3, "ms")
    yield Row(_PART, "that beside a copy", statistics.median(ratios), "x", 1.2)
    yield Row(_PART, "files that differ between the two", 0 if equal else 1, "", 0)


def _files(folder: Path) -> dict[str, str]:
    files = json.loads((folder / "checkpoint.json").read_text())["files"]
    return {name: digest for name, (_, digest) in files.items() if name.startswith("learner/")}
