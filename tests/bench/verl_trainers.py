"""verl's own trainers on colocate's worker groups, beside its own `RayWorkerGroup`, in the demo.

verl lives in an environment of its own (`make bench` makes it; VERL_PYTHON names its interpreter): without it there is
nothing to measure. The part takes a quarter of an hour.
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
_PROGRAM = Path(__file__).with_name("verl_steps.py")
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
        steps = {name: min(_median(run, "timing_s/step") for run in each) for name, each in runs.items()}
        spent = {name: min(_median(run, "cpu_s") for run in each) for name, each in runs.items()}
        starts = {name: min(run["start_s"] for run in each) for name, each in runs.items()}
        yield Row(_PART, f"PPO step of {trainer}, verl's", steps["verl"] * 1e3, "ms")
        yield Row(_PART, f"CPU time of a step of {trainer}, verl's", spent["verl"] * 1e3, "ms")
        yield Row(_PART, f"start of {trainer}, verl's", starts["verl"], "s")
        for name in executors:
            bar = _BARS[trainer]
            yield Row(_PART, f"PPO step of {trainer}, on {name}, to verl's", steps[name] / steps["verl"], "x")
            yield Row(_PART, f"CPU time of {trainer}, on {name}, to verl's", spent[name] / spent["verl"], "x", bar)
            yield Row(_PART, f"start of {trainer}, on {name}, to verl's", starts[name] / starts["verl"], "x", 1.0)


def _median(run: dict[str, Any], name: str) -> float:
    """Return the median of the steps without the first, which warms up."""
    return statistics.median(step[name] for step in run["steps"][1:])


def _demo(python: str, trainer: str, executor: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, "-W", "ignore", str(_PROGRAM), "--trainer", trainer, "--executor", executor]
        command += ["--steps", str(_STEPS), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        run: dict[str, Any] = json.loads(out.read_text())
        return run
