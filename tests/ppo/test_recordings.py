"""PPO with replayed rollouts and rewards logs the same metrics as the recorded run."""

from __future__ import annotations

import json
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
# The example has all its steps, but a shorter warm-up.
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
    """Run PPO in a folder; return its metrics without times."""
    given = [*own, f"name={name}", *changes, *([] if executor is None else [f"executor={json.dumps(executor)}"])]
    with colocate.launch(colocate.load_config(EXAMPLES / f"{example}.yaml", set=given)) as job:
        record = job.run(quiet=True, resume=resume)
    rows = [json.loads(line) for line in (Path(record.directory) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("time", "seconds")} for row in rows]


def replay(name: str) -> list[str]:
    return [f"replay={json.dumps(dict.fromkeys(('actor', 'reward'), f'runs/{name}'))}"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Record a run on threads; return the folder and the metrics."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run(folder, "first", RECORD)


@pytest.mark.parametrize("name", EXECUTORS)
def test_the_same_numbers(first: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A replay of actor and reward logs all metrics to the last digit, on every executor."""
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
    """Record the example's hundred steps on threads; return the folder and the metrics."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run(folder, "first", RECORD, LOCAL["threads"], example="ppo", own=WHOLE)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["threads", "processes", "ray", "dask"])
def test_a_hundred_steps(whole: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A replay of the example's hundred steps logs all metrics to the last digit, on every executor."""
    pytest.importorskip({"dask": "distributed", "ray": "ray"}.get(name, "torch"))
    folder, before = whole
    monkeypatch.chdir(folder)
    again = run(folder, f"on-{name}", replay("first"), LOCAL.get(name, name), example="ppo", own=WHOLE)
    assert again == before
    assert [row["step"] for row in before] == [*range(101)]
    assert {"reward", "kl", "value_loss", "accuracy"} <= before[-1].keys()
