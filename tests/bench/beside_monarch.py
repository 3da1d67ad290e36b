"""Beside Monarch, on processes of this machine: starts, calls, a tensor there and back.

Monarch lives in an environment of its own (`make bench` makes it; MONARCH_PYTHON names its interpreter): without that
there is nothing here.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from tests.bench.measure import asking, median_s
from tests.bench.rows import Row

import colocate
from colocate import First, Role, method

_PART = "Monarch, processes of this machine"
_TENSOR_BYTES = 64 << 20


class Probe(Role):
    """The same as a role."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(8, 8)

    @method(collect=First())
    def noop(self) -> None:
        """Nothing."""

    @method(collect=First())
    def echo(self, x: torch.Tensor) -> torch.Tensor:
        return x


def rows() -> Iterator[Row]:
    """Each in turns."""
    if (python := os.environ.get("MONARCH_PYTHON")) is None:
        return
    with ExitStack() as stack:
        command = [python, "-P", str(Path(__file__).with_name("on_monarch.py"))]
        theirs = stack.enter_context(asking(command))
        runtime = stack.enter_context(colocate.connect(processes=True))
        both = stack.enter_context(runtime.reserve(2)).spawn({"probe": colocate.role(Probe)}).role("probe", Probe)
        one = stack.enter_context(runtime.reserve(1)).spawn({"probe": colocate.role(Probe)}).role("probe", Probe)
        x = torch.rand(_TENSOR_BYTES // 4)

        def ask(what: str, times: int) -> float:
            return float(theirs(f"{what} {times}"))

        def start() -> float:
            with runtime.reserve(2) as pool:
                return median_s(lambda: pool.spawn({"probe": colocate.role(Probe)}), 1)

        start()
        yield from _row("spawn of 2 whose roles need torch", "ms", 5, lambda: ask("start", 1), start, bar=0.5)
        yield from _row(
            "a call that does nothing, 2 slots", "µs", 20, lambda: ask("noop", 50), lambda: median_s(both.noop, 50)
        )
        yield from _row(
            "a 64 MB tensor there and back", "ms", 8, lambda: ask("echo", 1), lambda: median_s(lambda: one.echo(x), 1)
        )


def _row(
    name: str, unit: str, rounds: int, theirs: Callable[[], float], ours: Callable[[], float], bar: float | None = None
) -> Iterator[Row]:
    found = [(theirs(), ours()) for _ in range(rounds)]
    least = min(its for its, _ in found)
    yield Row(_PART, f"{name}, Monarch", least * (1e3 if unit == "ms" else 1e6), unit)
    yield Row(_PART, "ours to that", statistics.median(mine / its for its, mine in found), "x", bar)
