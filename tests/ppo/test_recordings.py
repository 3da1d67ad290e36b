"""PPO whose rollouts and rewards are recorded, and then answered from there: all that is logged is the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import colocate

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ppo-small.yaml"
CHANGES = [f"job.with.{name}={value}" for name, value in {"warm_up_steps": 5, "steps": 4, "eval_every": 2}.items()]
CHANGES.append("job.with.checkpoint_every=2")
CLUSTERS = [pytest.param(name, marks=pytest.mark.long) for name in ("ray", "dask")]
LOCAL = {name: {"use": "local", "with": {"processes": name == "processes"}} for name in ("threads", "processes")}
EXECUTORS = [*LOCAL, *CLUSTERS]
RECORD = ["record=[actor, reward]"]


def run(folder: Path, name: str, changes: list[str], executor: Any = None, resume: bool = False) -> list[Any]:
    """Run PPO in a folder, and return what it logs."""
    given = [*CHANGES, f"name={name}", *changes, *([] if executor is None else [f"executor={json.dumps(executor)}"])]
    with colocate.launch(colocate.load_config(EXAMPLE, set=given)) as job:
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
    executor = (
        {"use": "local", "with": {"processes": name == "processes"}} if name in ("threads", "processes") else name
    )
    again = run(folder, f"on-{name}", replay("first"), executor)
    assert again == before
    assert len(before) == 5
    assert "value_loss" in before[-1]
    report = (folder / "runs" / f"on-{name}" / "config.yaml").read_text()
    assert "replay" in report


@pytest.mark.long
@pytest.mark.parametrize("name", ["ray", "dask"])
def test_recorded_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """What a cluster's workers have written is answered from on this machine."""
    pytest.importorskip({"dask": "distributed"}.get(name, name))
    monkeypatch.chdir(tmp_path)
    before = run(tmp_path, "first", RECORD, name)
    assert run(tmp_path, "again", replay("first")) == before


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
