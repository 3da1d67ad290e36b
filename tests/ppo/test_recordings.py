"""PPO whose rollouts and rewards are recorded, and then answered from there: all that is logged is the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import colocate

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
CHANGES = [f"job.with.{name}={value}" for name, value in {"warm_up_steps": 5, "steps": 4, "eval_every": 2}.items()]
CHANGES.append("job.with.checkpoint_every=2")
CLUSTERS = [pytest.param(name, marks=pytest.mark.long) for name in ("ray", "dask")]
LOCAL = {name: {"use": "local", "with": {"processes": name == "processes"}} for name in ("threads", "processes")}
EXECUTORS = [*LOCAL, *CLUSTERS]
RECORD = ["record=[actor, reward]"]
# All steps of the example as it is, whose actor is but warmed up less.
WHOLE = ["job.with.warm_up_steps=30"]


def run(
    folder: Path,
    name: str,
    changes: list[str],
    executor: Any = None,
    resume: bool = False,
    example: str = "ppo-small",
    own: list[str] = CHANGES,
) -> list[Any]:
    """Run PPO in a folder, and return what it logs."""
    given = [*own, f"name={name}", *changes, *([] if executor is None else [f"executor={json.dumps(executor)}"])]
    with colocate.launch(colocate.load_config(EXAMPLES / f"{example}.yaml", set=given)) as job:
        record = job.run(quiet=True, resume=resume)
    rows = [json.loads(line) for line in (Path(record.directory) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("time", "seconds")} for row in rows]


def replay(name: str) -> list[str]:
    return [f"replay={json.dumps(dict.fromkeys(('actor', 'reward'), f'runs/{name}'))}"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run on threads that was recorded, and what it has logged."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run(folder, "first", RECORD)


@pytest.mark.parametrize("name", EXECUTORS)
def test_the_same_numbers(first: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All digits of all metrics, whatever the executor: the critic learns what it learned, without an actor."""
    pytest.importorskip({"dask": "distributed", "ray": "ray"}.get(name, "torch"))
    folder, before = first
    monkeypatch.chdir(folder)
    again = run(folder, f"on-{name}", replay("first"), LOCAL.get(name, name))
    assert again == before
    assert len(before) == 5
    assert "value_loss" in before[-1]
    report = (folder / "runs" / f"on-{name}" / "config.yaml").read_text()
    assert "replay" in report


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The example's hundred steps on threads, recorded, and what they have logged."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run(folder, "first", RECORD, LOCAL["threads"], example="ppo", own=WHOLE)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["threads", "processes", "ray", "dask"])
def test_a_hundred_steps(whole: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All digits of all metrics of each of the example's steps, whatever the executor."""
    pytest.importorskip({"dask": "distributed", "ray": "ray"}.get(name, "torch"))
    folder, before = whole
    monkeypatch.chdir(folder)
    again = run(folder, f"on-{name}", replay("first"), LOCAL.get(name, name), example="ppo", own=WHOLE)
    assert again == before
    assert [row["step"] for row in before] == [*range(101)]
    assert {"reward", "kl", "value_loss", "accuracy"} <= before[-1].keys()


@pytest.mark.long
@pytest.mark.parametrize("name", ["ray", "dask"])
def test_recorded_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """What a cluster's workers have written is answered from on this machine."""
    pytest.importorskip({"dask": "distributed"}.get(name, name))
    monkeypatch.chdir(tmp_path)
    before = run(tmp_path, "first", RECORD, name)
    assert run(tmp_path, "again", replay("first")) == before


@pytest.mark.long
def test_other_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    """Two ranks, one and four learn the same, as near as sums in another order are; a planted fault is told."""
    monkeypatch.chdir(tmp_path)
    roles = ("actor", "critic", "reward")
    # Each rank draws numbers of its own: so cold, there is nothing to draw.
    cold = ["job.with.temperature=1e-6", "job.with.steps=2", "job.with.eval_every=1"]
    run(tmp_path, "first", [*cold, f"record={json.dumps(roles)}", "pools.main.slots=2"], LOCAL["processes"])
    compare = [*cold, f"compare={json.dumps(dict.fromkeys(roles, 'runs/first'))}", "tolerance=1e-3"]

    def compared(name: str, *more: str) -> list[Any]:
        run(tmp_path, name, [*compare, *more], LOCAL["processes"])
        tables = json.loads((tmp_path / "runs" / name / "comparison.json").read_text())
        return [row for role in roles for row in tables[f"policy.{role}"]]

    for slots in (1, 4):
        rows = compared(f"on-{slots}", f"pools.main.slots={slots}")
        assert [row["first"] for row in rows] == [None] * len(rows)
        assert {row["method"] for row in rows} >= {"generate", "log_probs", "update", "weights", "advantages", "score"}
        assert sum(row["calls"] for row in rows) == 38
    assert "differs from" not in caplog.text
    compared("other", "pools.main.slots=1", "groups.policy.roles.actor.with.warm_up_lr=1e-3")
    told = [each.getMessage() for each in caplog.records if "differs from" in each.getMessage()]
    assert "actor.warm_up, call 1: its value was" in told[0]  # the first one after it has learned something


@pytest.mark.long
def test_from_a_step_on(first: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that goes on from a checkpoint is answered from the step after that."""
    folder, before = first
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "runs", tmp_path / "runs")
    shutil.copytree(folder / "runs" / "first", tmp_path / "runs" / "whole")
    shutil.rmtree(tmp_path / "runs" / "first" / "checkpoints" / "step-000004")
    assert run(tmp_path, "first", [*replay("whole"), "replay_from=3"], resume=True) == before


def test_a_planted_fault_is_told_at_its_call(
    first: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An actor with another learning rate is the same until it has learned; from there on it is it that differs."""
    folder, _ = first
    monkeypatch.chdir(folder)
    compare = [f"compare={json.dumps(dict.fromkeys(('actor', 'reward'), 'runs/first'))}"]
    run(folder, "other", [*compare, "groups.policy.roles.actor.with.lr=1e-2"])
    told = [each.getMessage() for each in caplog.records if "differs from" in each.getMessage()]
    assert "role 'actor'" in told[0]
    assert "its arguments were the same" in told[0]
    table = json.loads((folder / "runs" / "other" / "comparison.json").read_text())
    by_method = {row["method"]: row for row in table["policy.actor"]}
    assert by_method["warm_up"]["differ"] == 0
    assert by_method["update"]["differ"] > 0
