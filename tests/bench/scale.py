"""What the driver does for each slot when there are many: it may not grow with their number."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.bench.rows import Row
from tests.bench.stub import StubExecutor

import colocate
from colocate import Pool
from colocate._runtime import Runtime
from colocate.testing.probes.plain import Echo, Rows

_PART = "driver CPU per slot, stub executor"
_SLOTS = (100, 1_000, 10_000)
_FLAT = 1.5
_ROUNDS = 8
_PER_ROUND = 10_000  # slots times repetitions: each size works as long


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
    backwards = range(slots - 1, -1, -1)
    roles = {"echo": colocate.role(Echo), "rows": colocate.role(Rows), "back": colocate.role(Echo).on(slots=backwards)}
    seconds = dict.fromkeys(("spawn", "call", "call with rows", "call on slots in another order", "close"), 0.0)
    batch = list(range(slots))
    for _ in range(times):
        spent, group = _timed(pool.spawn, roles)
        seconds["spawn"] += spent
        group.role("echo", Echo).noop()
        seconds["call"] += _timed(group.role("echo", Echo).noop)[0]
        seconds["call with rows"] += _timed(group.role("rows", Rows).seen, batch)[0]
        seconds["call on slots in another order"] += _timed(group.role("back", Echo).noop)[0]
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
