"""The memory cost of fused roles: one worker with several roles, against the memory of the roles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.bench.rows import Row

import colocate
from colocate import Concat, First, Role, Scatter, method

_PART = "fused memory (PSS)"
_ROLES = 4
_MIB = 1 << 20
_EACH = 128 * _MIB


class Weights(Role):
    def __init__(self, count: int) -> None:
        self.weights = torch.ones(count, dtype=torch.uint8)

    @method(collect=First())
    def pid(self) -> int:
        return os.getpid()

    @method(dispatch=Scatter("batch"), collect=Concat())
    def run(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.weights[:1].sum()


def rows() -> Iterator[Row]:
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(slots=2) as pool:
        empty = pool[0].spawn({"empty": colocate.role(Weights, 0)})
        names = [f"role{number}" for number in range(_ROLES)]
        fused = pool[1].spawn({name: colocate.role(Weights, _EACH) for name in names})
        batch = torch.ones(_MIB // 4)
        for group, roles in ((empty, ["empty"]), (fused, names)):
            for name in roles:
                group.role(name, Weights).run(batch)
        alone = _proportional_bytes(empty.role("empty", Weights).pid())
        together = _proportional_bytes(fused.role(names[0], Weights).pid())
    yield Row(_PART, "an empty torch worker", alone / _MIB, "MiB")
    allowed = alone + 1.05 * _ROLES * _EACH
    yield Row(_PART, f"{_ROLES} roles of {_EACH // _MIB} MiB in one worker", together / _MIB, "MiB", allowed / _MIB)


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process, with shared pages counted by their share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("Pss:"))
    return int(kibibytes) << 10
