"""The cost of many slots of one machine, with workers: reserve, spawn, call and close, at several sizes.

The part `scale` counts the driver's work without workers, for more slots than a machine has room for. Each size has a
driver of its own: `python -m tests.bench.slots EXECUTOR SLOTS`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tests.bench.rows import Row

import colocate
from colocate.testing.probes.plain import Echo

_PART = "many slots of one machine"
_OPTIONS: dict[str, dict[str, Any]] = {"threads": {}, "processes": {"processes": True}, "ray": {}, "dask": {}}
_SIZES = {"threads": (16, 64, 256), "processes": (8, 32, 128), "ray": (16, 64, 256), "dask": (4, 16, 32)}
_CALLS = 30

T = TypeVar("T")


def rows() -> Iterator[Row]:
    """Yield the time of each step at each size, and the time per further slot from the smallest size to the largest."""
    for name, sizes in _SIZES.items():
        found = {slots: _run(name, slots) for slots in sizes}
        fewest, *_, most = sizes
        for what in found[fewest]:
            times, unit = (1e6, "µs") if "call" in what else (1e3, "ms")
            for slots, told in found.items():
                yield Row(_PART, f"{name}: {what}, {slots} slots", told[what] * times, unit)
            if "per slot" not in what:
                slope = (found[most][what] - found[fewest][what]) / (most - fewest)
                yield Row(_PART, f"{name}: {what}, each further slot", slope * times, unit)


def _run(name: str, slots: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.slots", name, str(slots)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict[str, float](json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    name, slots = sys.argv[1], int(sys.argv[2])
    took: dict[str, float] = {}

    def timed(what: str, function: Callable[[], T]) -> T:
        began = time.perf_counter()
        value = function()
        took[what] = time.perf_counter() - began
        return value

    executor = "local" if name in ("threads", "processes") else name
    with colocate.connect(executor, **_OPTIONS[name]) as runtime:
        runtime.reserve(1, cpus=0).spawn({"echo": colocate.role(Echo)}).close()  # all imports happen here
        pool = timed("reserve", lambda: runtime.reserve(slots, cpus=0, timeout=300))
        group = timed("spawn", lambda: pool.spawn({"echo": colocate.role(Echo)}, timeout=300))
        echo = group.role("echo", Echo)
        echo.noop()
        before, calls = time.process_time(), []
        for _ in range(_CALLS):
            began = time.perf_counter()
            echo.noop()
            calls.append(time.perf_counter() - began)
        took["a call"] = statistics.median(calls)
        took["driver CPU per slot and call"] = (time.process_time() - before) / _CALLS / slots
        timed("close", pool.close)
    print(json.dumps(took))


if __name__ == "__main__":
    main()
