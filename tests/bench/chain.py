"""A chain of seven role calls on Ray: by residents here, by values through verl's fused worker group.

Each call but the last adds one to a batch of 64 MB; the last one ends in a number. verl lives in an environment of its
own (`make bench` makes it; VERL_PYTHON names its interpreter), without which only this side is measured.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from tests.bench.measure import asking, side_by_side
from tests.bench.rows import Row

import colocate
from colocate import Concat, Reduce, Role, Scatter, method, wire

_PART = "Ray: 7 role calls on a 64 MB batch, 2 slots"
_ROWS, _COLUMNS = 4096, 4096
_BYTES = _ROWS * _COLUMNS * 4
_ROUNDS = 5
_SLOWER = 10.0


class Adder(Role):
    @method(dispatch=Scatter("x"), collect=Concat())
    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @method(dispatch=Scatter("x"), collect=Reduce("sum"))
    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())


def rows() -> Iterator[Row]:
    batch = torch.zeros(_ROWS, _COLUMNS)
    with colocate.connect("ray", cpus=8) as runtime, runtime.reserve(slots=2) as pool:
        group = pool.spawn({name: colocate.role(Adder) for name in "abcd"})
        roles = [group.role(name, Adder) for name in "abcdab"]
        last = group.role("c", Adder)

        def chain() -> None:
            with group.scope():
                value = batch
                for role in roles:
                    value = role.add.keep(value).ref
                assert last.total(value) == 6.0 * batch.numel()

        ours = side_by_side({"ours": chain}, rounds=_ROUNDS, calls=1)["ours"].least
        yield Row(_PART, "by residents", ours * 1e3, "ms")
        yield Row(_PART, "bytes through the driver to the batch", _bytes_through(chain) / _BYTES, "x", 1.05)
    verl = _verl()
    if verl is not None:
        yield Row(_PART, "by values, verl's fused RayWorkerGroup", verl * 1e3, "ms")
        yield Row(_PART, "by residents to that", ours / verl, "x", 1 / _SLOWER)


def _bytes_through(chain: object) -> int:
    """Return the bytes that the driver packs into messages and unpacks from messages during one chain."""
    moved = 0
    encode, split = wire.framing.encode, wire.framing._split_body

    def encoded(head: wire.Head, body: wire.Packed | None = None) -> wire.Frame:
        nonlocal moved
        if body is not None:
            moved += len(body.data) + sum(buffer.nbytes for buffer in body.buffers)
        return encode(head, body)

    def taken(payload: memoryview, sizes: tuple[int, ...]) -> wire.Packed:
        nonlocal moved
        moved += sum(sizes)
        return split(payload, sizes)

    with (
        mock.patch.object(wire, "encode", encoded),
        mock.patch.object(wire.lane, "encode", encoded),
        mock.patch.object(wire.framing, "_split_body", taken),
    ):
        chain()  # type: ignore[operator]
    return moved


def _verl() -> float | None:
    python = os.environ.get("VERL_PYTHON")
    if python is None:
        return None
    program = Path(__file__).with_name("verl_groups.py")
    with asking([python, str(program), str(_ROWS), str(_COLUMNS)], COLOCATE_VERL="") as ask:
        return statistics.median([float(ask("chain")) for _ in range(_ROUNDS + 1)][1:])
