"""The job within a budget: its roles take turns, and it learns the same to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.shared import cluster

import colocate

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo.yaml"
FEW = {"warm_up_steps": 4, "steps": 4, "batch": 32, "minibatch": 16, "eval_problems": 16, "eval_every": 3}
BUDGET = ["groups.policy.residency=swap", "groups.policy.device_memory=7.2MiB"]
HELD_MIB = 12.0  # by all roles after the first step
NUMBERS = ("policy_loss", "value_loss", "policy_grad_norm", "value_grad_norm", "reward", "kl", "entropy")


class Moves:
    """Hears of what sleeps and wakes."""

    def __init__(self) -> None:
        self.records: list[colocate.MoveRecord] = []

    def colocate_memory_moved(self, record: colocate.MoveRecord) -> None:
        """One of them."""
        self.records.append(record)


def run(executor: Mapping[str, Any], slots: int, changes: list[str]) -> tuple[list[Any], list[float], Moves]:
    """What the job logs, how much each worker's roles hold at its end, and what moved."""
    job = [f"job.with.{name}={value}" for name, value in FEW.items()]
    where = [f"executor={json.dumps(executor)}", f"pools.main.slots={slots}"]
    config = colocate.load_config(EXAMPLE, set=[*job, *where, *changes])
    moves = Moves()
    with colocate.launch(config) as launched:
        launched.runtime.observe(moves)
        record = launched.run(quiet=True)
        memory = launched.groups["policy"].memory()
        held = [sum(role.total for role in slot.roles) / 2**20 for slot in memory.slots]
    rows = [json.loads(line) for line in (record.directory / "metrics.jsonl").read_text().splitlines()]
    return [[row[name] for name in NUMBERS if name in row] for row in rows], held, moves


@pytest.fixture(
    scope="module",
    params=["threads", *(pytest.param(name, marks=pytest.mark.long) for name in ("processes", "ray", "dask"))],
)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Mapping[str, Any], int]]:
    """An executor's entry in a config, and how many slots to take."""
    name: str = request.param
    if name in ("ray", "dask"):
        with cluster(name) as options:
            yield {"use": name, "with": dict(options)}, 2
    else:
        yield {"use": "local", "with": {"processes": name == "processes"}}, 2 if name == "processes" else 1


def test_with_a_budget(engine: tuple[Mapping[str, Any], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty percent of what its roles hold are enough."""
    monkeypatch.chdir(tmp_path)
    free, held, moves = run(*engine, [])
    assert not moves.records
    assert all(each == pytest.approx(HELD_MIB, rel=0.05) for each in held)
    within, held, moves = run(*engine, BUDGET)
    assert len(free) == 1 + FEW["steps"]
    assert within == free
    assert all(each <= 0.6 * HELD_MIB for each in held)
    assert {(record.role, record.kind) for record in moves.records} >= {("actor", "sleep"), ("critic", "wake")}
