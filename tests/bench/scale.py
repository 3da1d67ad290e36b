"""What the driver does for each slot when there are many: it may not grow with their number."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.bench.rows import Row
from tests.bench.stub import StubExecutor

import colocate
from colocate import Pool, Role, Scatter, method
from colocate._runtime import Runtime

_PART = "driver CPU per slot, stub executor"
_SLOTS = (100, 1_000, 10_000)
_FLAT = 1.5
_ROUNDS = 5
_PER_ROUND = 10_000  # slots times repetitions: each size works as long


class Counted(Role):
    """Its methods are only called, never run."""

    @method
    def same(self) -> None:
        """Every rank gets the same."""

    @method(dispatch=Scatter("rows"))
    def share(self, rows: list[int]) -> None:
        """Every rank gets rows of its own."""


def rows() -> Iterator[Row]:
    """Spawn, calls and close at each size, and how flat they are."""
    cheapest: dict[str, dict[int, float]] = {}
    with Runtime("stub", StubExecutor(), 0, False) as runtime:
        pools = [runtime.reserve(slots=slots) for slots in _SLOTS]
        for _ in range(_ROUNDS):
            for pool in pools:
                slots = len(pool)
                for name, seconds in _round(pool, slots).items():
                    found = cheapest.setdefault(name, {})
                    found[slots] = min(seconds, found.get(slots, seconds))
    for name, found in cheapest.items():
        for slots, seconds in found.items():
            yield Row(_PART, f"{name}, {slots:,} slots", seconds * 1e6, "µs")
        yield Row(_PART, f"{name}, dearest to cheapest", max(found.values()) / min(found.values()), "x", _FLAT)


def _round(pool: Pool, slots: int) -> dict[str, float]:
    """CPU seconds per slot of each operation."""
    times = _PER_ROUND // slots
    roles = {"all": colocate.role(Counted), "half": colocate.role(Counted).on(slots=range(slots // 2, slots))}
    seconds = dict.fromkeys(("spawn", "call", "call with rows", "call on half of the slots", "close"), 0.0)
    for _ in range(times):
        spent, group = _timed(pool.spawn, roles)
        seconds["spawn"] += spent
        everywhere, half = group.role("all", Counted), group.role("half", Counted)
        batch = list(range(slots))
        everywhere.same()
        seconds["call"] += _timed(everywhere.same)[0]
        seconds["call with rows"] += _timed(everywhere.share, batch)[0]
        seconds["call on half of the slots"] += 2 * _timed(half.same)[0]
        seconds["close"] += _timed(group.close)[0]
    return {name: spent / (times * slots) for name, spent in seconds.items()}


def _timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    # Collecting garbage costs by what else is in memory, at moments of its own choosing.
    gc.disable()
    try:
        start = time.process_time()
        value = function(*args)
        return time.process_time() - start, value
    finally:
        gc.enable()
