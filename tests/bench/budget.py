"""The demo within a budget of sixty percent of its roles' memory, beside the demo without one, on each executor."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.rows import Row

import colocate

_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo.yaml"
_PART = "a step of the demo within 60 % of its roles' memory, beside one without a budget"
_CHANGES = [
    *("job.with.warm_up_steps=20", "job.with.steps=12", "job.with.eval_every=1000", "job.with.checkpoint_every=1000"),
    "job.with.critic_only_steps=0",
]
_BUDGET = ["groups.policy.residency=swap", "groups.policy.device_memory=7.2MiB"]
_EXECUTORS = {
    "local, processes": ("local", ["executor.with.processes=true"]),
    "dask": ("dask", []),
    "ray": ("ray", []),
}
_SAME = ("reward", "kl", "value_loss", "policy_loss", "entropy")
_ROUNDS, _FIRST = 2, 3


def rows() -> Iterator[Row]:
    """Run whole jobs in turns; yield the median of their steps, from the fourth one on."""
    for name, (executor, changes) in _EXECUTORS.items():
        free: list[float] = []
        within: list[float] = []
        for _ in range(_ROUNDS):
            (one, others), (other, its) = (_steps(executor, [*changes, *more]) for more in ([], _BUDGET))
            assert one == other, "it has learned something else"
            free += others[_FIRST:]
            within += its[_FIRST:]
        ratio = statistics.median(within) / statistics.median(free)
        yield Row(_PART, f"{name}, without", statistics.median(free) * 1e3, "ms")
        yield Row(_PART, f"{name}, ratio", ratio, "x", 1.3)


def _steps(executor: str, changes: Sequence[str]) -> tuple[list[Any], list[float]]:
    config = colocate.load_config(_EXAMPLE, executor=executor, set=[*_CHANGES, *changes])
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), colocate.launch(config) as launched:
        record = launched.run(quiet=True)
    steps = [row for row in record.metrics if row["step"] > 0]
    return [[row[name] for name in _SAME] for row in steps], [sum(row["seconds"].values()) for row in steps]
