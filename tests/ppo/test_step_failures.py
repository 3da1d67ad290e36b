"""A step in which one rank raises is retried, and the run logs the metrics of an undisturbed run.

The memory of the undisturbed run is also compared with `colocate plan`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from tests.conformance.shared import cluster
from tests.forked import Forks

import colocate
from colocate import GroupMemory, RoleError
from colocate_ppo.recovery import OnStepFailure

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo-fsdp2.yaml"
AT = 3
SMALL = [
    "+groups.policy.roles.actor.with.layers=1",
    "groups.policy.roles.actor.with.hidden=32",
    "groups.policy.roles.actor.with.feed_forward=64",
    "job.with={task_options: {min_word_len: 3, max_word_len: 5}, warm_up_steps: 2, warm_up_batch: 9, steps: 4,"
    " batch: 24, minibatch: 8, critic_only_steps: 0, actor_ramp: 1, eval_every: 4, eval_problems: 8,"
    " checkpoint_every: 2}",
]


@attrs.frozen
class Trained:
    """A run's metrics without times, its last generation, and the memory that its roles hold at the end."""

    rows: list[dict[str, Any]]
    generation: int
    memory: GroupMemory

    @property
    def undisturbed(self) -> list[dict[str, Any]]:
        """The metrics without the counts of failed calls."""
        return [{name: value for name, value in row.items() if name != "failed_calls"} for row in self.rows]

    @property
    def failed(self) -> dict[int, int]:
        """The number of failed calls by step."""
        return {row["step"]: row["failed_calls"] for row in self.rows if "failed_calls" in row}


def train(folder: Path, *changes: str, whole: bool = False) -> Trained:
    """Run the example, with a small model and few steps unless `whole`."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with colocate.launch(colocate.load_config(EXAMPLE, set=[*(() if whole else SMALL), *changes])) as job:
            record = job.run(quiet=True)
            rows = [{k: v for k, v in row.items() if k not in ("seconds", "time")} for row in record.metrics]
            (memory,) = record.memory
            return Trained(rows, job.groups["policy"].generation, memory)


def failing(folder: Path, where: str, minibatch: int = 1, step: int = AT) -> list[str]:
    """Return the config changes that make the actor fail on the last rank."""
    options = {"where": where, "step": step, "once": str(folder / "failed"), "minibatch": minibatch}
    given = [f"+groups.policy.roles.actor.with.{name}={value}" for name, value in options.items()]
    return ["groups.policy.roles.actor.use=tests.ppo.faulty:FaultyActor", *given]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Run the example without a failure."""
    return train(tmp_path_factory.mktemp("expected") / "run")


@pytest.mark.long
def test_nothing_fails(expected: Trained) -> None:
    assert [row["step"] for row in expected.rows] == [0, 1, 2, 3, 4]
    assert expected.rows[3]["policy_grad_norm"] > 0
    assert not expected.failed
    assert expected.generation == 0


@pytest.mark.long
def test_plan_predicts_held_memory(expected: Trained, tmp_path: Path, forks: Forks) -> None:
    """`colocate plan` predicts the memory of a sharded actor and of whole models; tests/cli has the other layouts."""
    changes = [part for change in SMALL for part in ("--set", change)]
    done = forks.run(("plan", str(EXAMPLE), "--json", *changes), tmp_path, os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    (group,) = json.loads(done.stdout)
    plan = {role["role"]: role["kinds"] for role in group["roles"]}
    for role in expected.memory.slots[0].roles:
        if role.role:
            held = {kind: size for kind, size in role.device.items() if kind not in ("tensors", "residents")}
            assert {kind: size for kind, size in plan[role.role].items() if kind != "tensors"} == held, role.role


@pytest.mark.long
@pytest.mark.parametrize("where", ["backward", "rollout", "before", "update"])
def test_a_failed_part_is_done_again(tmp_path: Path, expected: Trained, where: str) -> None:
    """A failed part is retried with the same problems and random numbers, and all metrics are equal."""
    found = train(tmp_path / "run", *failing(tmp_path, where))
    assert (tmp_path / "failed").exists()
    assert found.undisturbed == expected.rows
    assert found.failed == {AT: 1}
    assert found.generation == 0


@pytest.mark.long
def test_on_one_slot(tmp_path: Path) -> None:
    """On one slot, where no rank waits, a failed backward pass is retried, with unchanged metrics."""
    one = "pools.main.slots=1"
    undisturbed = train(tmp_path / "undisturbed", one)
    found = train(tmp_path / "run", one, *failing(tmp_path, "backward"))
    assert found.undisturbed == undisturbed.rows
    assert found.failed == {AT: 1}


@pytest.mark.long
def test_weights_of_two_steps_go_back_to_the_checkpoint(tmp_path: Path, expected: Trained) -> None:
    """A failure after the last collective leaves the ranks with different weights, and the group restarts."""
    found = train(tmp_path / "run", *failing(tmp_path, "last collective"))
    assert found.rows == expected.rows
    assert found.generation == 1


@pytest.mark.long
def test_going_back_to_the_checkpoint_instead(tmp_path: Path, expected: Trained) -> None:
    found = train(tmp_path / "run", *failing(tmp_path, "backward"), on_step_failure("restore"))
    assert found.undisturbed == expected.rows
    assert found.failed == {AT: 1}
    assert found.generation == 0


@pytest.mark.long
def test_ending_the_run_instead(tmp_path: Path) -> None:
    with pytest.raises(RoleError, match="in step 3: backward"):
        train(tmp_path / "run", *failing(tmp_path, "backward"), on_step_failure("fail"))


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Return the config changes for an executor: none for the config's own."""
    if request.param == "local":
        yield []
        return
    pytest.importorskip({"dask": "distributed"}.get(request.param, request.param))
    with cluster(request.param) as options:
        yield [f"executor={json.dumps({'use': request.param, 'with': options})}"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("chosen", "where"),
    [("local", "backward"), ("local", "last collective"), ("ray", "last collective"), ("dask", "backward")],
    indirect=["chosen"],
)
def test_the_example_learns_all_the_same(tmp_path: Path, chosen: list[str], where: str) -> None:
    """The whole example learns despite a failure in step 30, on every executor."""
    found = train(tmp_path / "run", *failing(tmp_path, where, step=30), *chosen, whole=True)
    assert (tmp_path / "failed").exists()
    assert [row["step"] for row in found.rows] == [*range(61)]
    assert found.generation == (where == "last collective")
    accuracies = [row["eval_accuracy"] for row in found.rows if "eval_accuracy" in row]
    assert accuracies[0] < 0.35
    assert accuracies[-1] > 0.8


def on_step_failure(how: OnStepFailure) -> str:
    return f"+job.with.on_step_failure={how}"
