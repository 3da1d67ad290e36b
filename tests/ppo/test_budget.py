"""The PPO job within a memory budget: roles take turns, and the metrics are the same to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.shared import cluster
from tests.ppo.test_step_failures import AT, failing, train

import colocate

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo.yaml"
FEW = {"warm_up_steps": 2, "steps": 2, "batch": 16, "minibatch": 8, "eval_problems": 8, "eval_every": 1}
BUDGET = ["groups.policy.residency=swap", "groups.policy.device_memory=7.2MiB"]
HELD_MIB = 12.0  # The roles of a worker hold this much without a budget.
NUMBERS = ("policy_loss", "value_loss", "policy_grad_norm", "value_grad_norm", "reward", "kl", "entropy")


class Moves:
    """An observer that records memory moves."""

    def __init__(self) -> None:
        self.records: list[colocate.MoveRecord] = []

    def colocate_memory_moved(self, record: colocate.MoveRecord) -> None:
        self.records.append(record)


def run(executor: Mapping[str, Any], slots: int, changes: list[str]) -> tuple[list[Any], list[float], Moves]:
    """Return the job's metrics, the MiB that each worker's roles hold at its end, and the memory moves."""
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
    params=["processes", *(pytest.param(name, marks=pytest.mark.long) for name in ("ray", "dask"))],
)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Return an executor's entry in a config, and a number of slots."""
    name: str = request.param
    if name in ("ray", "dask"):
        with cluster(name) as options:
            yield {"use": name, "with": dict(options)}, 2
    else:
        yield {"use": "local", "with": {"processes": True}}, 2


@pytest.mark.long
def test_with_a_budget(engine: tuple[Mapping[str, Any], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sixty percent of the memory that roles hold otherwise, the job logs the same metrics."""
    monkeypatch.chdir(tmp_path)
    free, held, moves = run(*engine, [])
    assert not moves.records
    assert all(each == pytest.approx(HELD_MIB, rel=0.05) for each in held)
    within, held, moves = run(*engine, BUDGET)
    assert len(free) == 1 + FEW["steps"]
    assert within == free
    assert all(each <= 0.6 * HELD_MIB for each in held)
    assert {(record.role, record.kind) for record in moves.records} >= {("actor", "sleep"), ("critic", "wake")}


SHARDED = [
    "groups.policy.roles.actor.with.hidden=256",
    "groups.policy.roles.actor.with.feed_forward=512",
    "groups.policy.on_failure=restart",
    "job.with={task_options: {min_word_len: 3, max_word_len: 5}, warm_up_steps: 2, warm_up_batch: 9, steps: 4,"
    " batch: 24, minibatch: 8, critic_only_steps: 0, actor_ramp: 1, eval_every: 4, eval_problems: 8,"
    " checkpoint_every: 2}",
]
ITS_BUDGET = ["groups.policy.residency=swap", "groups.policy.device_memory=16MiB"]


@pytest.mark.long
@pytest.mark.parametrize("where", ["rollout", "before", "backward", "last collective"])
def test_a_failed_step_within_a_budget(where: str, tmp_path: Path) -> None:
    """A step that fails on one rank is retried within a budget, and the metrics are unchanged."""
    expected = train(tmp_path / "free", *SHARDED)
    within = train(tmp_path / "within", *SHARDED, *ITS_BUDGET, *failing(tmp_path, where))
    assert within.undisturbed == expected.rows
    torn = where == "last collective"  # The ranks' weights differ then, and the group restores its checkpoint.
    assert (within.failed, within.generation) == (({}, 1) if torn else ({AT: 1}, 0))
