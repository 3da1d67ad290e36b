"""verl's own trainers on colocate's worker groups, beside its own `RayWorkerGroup`: `python -m colocate_verl.demo`.

verl lives in an environment of its own (`make bench` makes it; VERL_PYTHON names its interpreter): without it there is
nothing to measure. A quarter of an hour.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.rows import Row

_PART = "verl 0.9.1's trainers, 2 workers, to its RayWorkerGroup"
_ROUNDS = 2
_STEPS = 8
_TRAINED = {"v0": ("ray", "local", "dask"), "v1": ("ray",)}
_BARS = {"v0": 1.0, "v1": 1.02}


def rows() -> Iterator[Row]:
    python = os.environ.get("VERL_PYTHON")
    if python is None:
        return
    for trainer, executors in _TRAINED.items():
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("verl", *executors)}
        for _ in range(_ROUNDS):
            for name, found in runs.items():
                found.append(_demo(python, trainer, name))
        steps = {name: min(map(_step_s, each)) for name, each in runs.items()}
        starts = {name: min(run["start_s"] for run in each) for name, each in runs.items()}
        yield Row(_PART, f"PPO step of {trainer}, verl's", steps["verl"] * 1e3, "ms")
        yield Row(_PART, f"start of {trainer}, verl's", starts["verl"], "s")
        for name in executors:
            bar = _BARS[trainer]
            yield Row(_PART, f"PPO step of {trainer}, on {name}, to verl's", steps[name] / steps["verl"], "x", bar)
            yield Row(_PART, f"start of {trainer}, on {name}, to verl's", starts[name] / starts["verl"], "x", 1.0)


def _step_s(run: dict[str, Any]) -> float:
    """The median of the steps but the first, which warms up."""
    return statistics.median(step["timing_s/step"] for step in run["steps"][1:])


def _demo(python: str, trainer: str, executor: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, "-W", "ignore", "-m", "colocate_verl.demo", "--trainer", trainer, "--executor", executor]
        command += ["--steps", str(_STEPS), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        run: dict[str, Any] = json.loads(out.read_text())
        return run
