"""Rows that end one by one: a stream of unequal rows beside a simulation, and what a row costs by itself."""

from __future__ import annotations

import asyncio
import heapq
import random
import time

from tests.bench.rows import Row

import colocate
from colocate import Role, method

_RANKS, _PLACES, _ROWS = 2, 16, 256
_SHORT = 2000


class Waiting(Role):
    """Rows that take a given time."""

    @method(rows="seconds", concurrency=_PLACES)
    async def play(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @method(rows="row", concurrency=_PLACES)
    async def nothing(self, row: int) -> int:
        return row


def rows() -> list[Row]:
    """Beside a simulation where the first place that is free takes the next row at no cost; on threads, processes."""
    times = [random.Random(0).uniform(0.005, 0.5) for _ in range(_ROWS)]
    found: list[Row] = []
    for where, processes in (("threads", False), ("processes", True)):
        with colocate.spawn({"env": colocate.role(Waiting)}, slots=_RANKS, processes=processes) as group:
            env = group.role("env", Waiting)
            list(env.play.stream(times[:4]))
            start = time.perf_counter()
            for _ in env.play.stream(times):
                pass
            took = time.perf_counter() - start
            start = time.perf_counter()
            for _ in env.nothing.stream(list(range(_SHORT))):
                pass
            each = (time.perf_counter() - start) / _SHORT
        part = f"a stream of {_ROWS} rows of 5 to 500 ms, {_RANKS} ranks x {_PLACES}, {where}"
        found.append(Row(part, "beside a simulation without costs", took / _simulated(times), "x", 1.1))
        found.append(Row(part, "a row that does nothing", each * 1e6, "us"))
    return found


def _simulated(times: list[float]) -> float:
    """When the last row ends, where the place that is free first takes the next one."""
    places = [0.0] * (_RANKS * _PLACES)
    for each in times:
        heapq.heapreplace(places, places[0] + each)
    return max(places)
