"""The time to start workers: light roles on all executors, then roles that need torch.

Each measurement has a driver of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.bench.rows import Row

_STARTS = 5
_BARS = {"local": ("local processes", 60.0), "ray": ("Ray", 120.0), "dask": ("Dask", 80.0)}
_PART = "spawn of 2 workers"


def rows() -> Iterator[Row]:
    light: dict[str, list[dict[str, float]]] = {executor: [] for executor in _BARS}
    for _ in range(_STARTS):
        for executor, found in light.items():
            found.append(_run(executor, "light"))
    for executor, (title, bar) in _BARS.items():
        name = f"{title}, light roles, directly after the reserve of a second pool"
        yield Row(_PART, name, _median(light[executor], "second") * 1e3, "ms", bar)
    first = _median(light["local"], "first of all")
    yield Row(_PART, "connect, reserve and spawn, local processes", first * 1e3, "ms")
    torch = [_run("local", "memory") for _ in range(_STARTS)]
    second = _median(torch, "second")
    yield Row(_PART, "local processes, roles that need torch, a second group", second * 1e3, "ms", 100.0)
    yield Row(_PART, "one more empty torch worker, summed PSS", _median(torch, "one more"), "MiB", 20.0)


def _run(executor: str, what: str) -> dict[str, float]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("starting.py")), executor, what]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict[str, float](json.loads(done.stdout.splitlines()[-1]))


def _median(steps: list[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in steps)
