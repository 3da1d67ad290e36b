"""The driver's work per slot with many slots: it may not grow with their number."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from tests.bench.rows import Row
from tests.bench.stub import StubExecutor

import colocate
from colocate import Pool, RoleSpec, Runtime
from colocate._api.connection import Connection
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows

_PART = "driver CPU per slot, stub executor"
_SLOTS = (100, 1_000, 10_000)
_FLAT = 1.5
_ROUNDS = 8
_PER_ROUND = 10_000  # slots times repetitions: the same work at each size

P = ParamSpec("P")
T = TypeVar("T")


def rows() -> Iterator[Row]:
    """Yield spawn, calls and close at each size, and the ratio of the costliest larger size to the smallest."""
    cheapest: dict[str, dict[int, float]] = defaultdict(dict)
    with Runtime._wrap(Connection("stub", StubExecutor(), 0, False, None, 60.0, None, None, None)) as runtime:
        pools = [runtime.reserve(slots=slots) for slots in _SLOTS]
        for _ in range(_ROUNDS):
            for pool in pools:
                slots = len(pool)
                for name, seconds in _round(pool, slots).items():
                    cheapest[name][slots] = min(seconds, cheapest[name].get(slots, seconds))
    for name, found in cheapest.items():
        for slots, seconds in found.items():
            yield Row(_PART, f"{name}, {slots:,} slots", seconds * 1e6, "µs")
        fewest, *more = found.values()
        yield Row(_PART, f"{name}, more slots to {_SLOTS[0]}", max(more) / fewest, "x", _FLAT)


def _round(pool: Pool, slots: int) -> dict[str, float]:
    """Return the CPU seconds per slot of each operation."""
    times = _PER_ROUND // slots
    clock = Clock()
    backwards = range(slots - 1, -1, -1)
    roles: dict[str, RoleSpec[Any]] = {
        "echo": colocate.role(Echo),
        "rows": colocate.role(Rows),
        "back": colocate.role(Echo).on(slots=backwards),
    }
    batch = list(range(slots))
    for _ in range(times):
        group = clock.time("spawn", pool.spawn, roles)
        echo, rows = group.role("echo", Echo), group.role("rows", Rows)
        echo.noop()
        clock.time("call", echo.noop)
        clock.time("call, other order", group.role("back", Echo).noop)
        clock.time("call with rows", rows.seen, batch)
        clock.time("call with a resident", rows.seen, rows.double.keep(batch).ref)
        clock.time("close", group.close)
    return {name: spent / (times * slots) for name, spent in clock.seconds.items()}


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def time(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # Garbage collection depends on all that is in memory, and runs at arbitrary moments.
        gc.disable()
        try:
            start = time.process_time()
            value = function(*args, **kwargs)
            self.seconds[name] += time.process_time() - start
            return value
        finally:
            gc.enable()
