"""How long workers take to start, beside the commit before they were forks.

Each measurement has a driver of its own. The commit before is taken out of this repository's history.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.measure import check_core, taken_out
from tests.bench.rows import Row

_BEFORE = "79a192f"
_STARTS = 5
_BARS = {"local": ("local processes", 60.0), "ray": ("Ray", 120.0), "dask": ("Dask", 80.0)}
_PART = "spawn of 2 workers"


def rows() -> Iterator[Row]:
    """Light roles on all executors, then roles that need torch."""
    ours: dict[str, list[dict[str, float]]] = {executor: [] for executor in _BARS}
    before: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="colocate-") as folder:
        there = taken_out(_BEFORE, Path(folder))
        for _ in range(_STARTS):
            if there:
                before.append(_run("local", "light", there))
            for executor, found in ours.items():
                found.append(_run(executor, "light"))
        for executor, (title, bar) in _BARS.items():
            name = f"{title}, light roles, directly after the reserve of a second pool"
            yield Row(_PART, name, _median(ours[executor], "second") * 1e3, "ms", bar)
        first = [each["first of all"] for each in ours["local"]]
        yield Row(_PART, "connect, reserve and spawn, local processes", statistics.median(first) * 1e3, "ms")
        if before:
            ratio = statistics.median(mine / its["first of all"] for mine, its in zip(first, before, strict=True))
            yield Row(_PART, f"the same, to commit {_BEFORE}", ratio, "x", 0.8)
    torch = [_run("local", "memory") for _ in range(_STARTS)]
    second = _median(torch, "second")
    yield Row(_PART, "local processes, roles that need torch, a second group", second * 1e3, "ms", 100.0)
    yield Row(_PART, "one more empty torch worker, summed PSS", _median(torch, "one more"), "MiB", 20.0)


def _run(executor: str, what: str, path: Sequence[str] = ()) -> dict[str, float]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("starting.py")), executor, what]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if path:  # which has no bytecode of its own yet: compiling it each time would be most of its time
        env["PYTHONPATH"] = os.pathsep.join(path)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    steps = json.loads(done.stdout.splitlines()[-1])
    check_core(steps.pop("of"), path)
    return dict[str, float](steps)


def _median(steps: list[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in steps)
