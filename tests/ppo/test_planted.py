"""Each of thirteen faults of a run that doesn't learn is found at its call, by a comparison, a check or a replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.ppo.test_grpo import OWN, TINY

import colocate
from colocate import WeightsDifferError

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "grpo.yaml"
ROLES = ("actor", "rollout", "reward")
RIGHT = [*TINY, *OWN, "+job.with.temperature=0.9", "job.with.steps=4", "job.with.eval_every=0"]
RIGHT += ["pools.main.slots=2", "executor={use: local, with: {processes: true}}"]
COMPARE = [f"compare={json.dumps(dict.fromkeys(ROLES, 'runs/right'))}"]


def with_role(role: str, name: str) -> list[str]:
    return [f"groups.policy.roles.{role}.use=tests.ppo.planted:{name}"]


def run(name: str, changes: Sequence[str]) -> None:
    with colocate.launch(colocate.load_config(EXAMPLE, set=[*RIGHT, f"name={name}", *changes])) as job:
        job.run(quiet=True)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run without a fault; return its folder."""
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("right", [f"record={json.dumps(ROLES)}"])
    return folder


REWARD, ACTOR = "groups.policy.roles.reward=tests.ppo.planted", "groups.policy.roles.actor"
COMPARED: list[tuple[str, list[str], str]] = [
    ("a wrong sign", [f"{REWARD}:WrongSign"], "reward.score, call 2"),  # All earlier answers have scored 0.
    ("shuffled labels", [f"{REWARD}:ShuffledLabels"], "reward.score, call 2"),
    ("a lost row", with_role("actor", "LostRow"), "actor.read, call 0"),
    ("padding", with_role("actor", "PadsLeft"), "actor.read, call 0"),
    ("dropout left on", with_role("actor", "Dropout"), "actor.log_probs, call 0"),
    ("another temperature", with_role("actor", "NoTemperature"), "actor.log_probs, call 0"),
    ("no baseline", with_role("actor", "NoBaseline"), "actor.advantages, call 1"),
    ("a learning rate", [f"{ACTOR}.with.lr=1e-2"], "actor.learn, call 1"),
    ("mixed rows", with_role("rollout", "MixedRows"), "rollout.generate, call 0, row 1"),
]


@pytest.mark.parametrize(
    ("changes", "call"),
    [pytest.param(*each, id=name, marks=[] if name == "padding" else pytest.mark.long) for name, *each in COMPARED],
)
def test_compared(
    right: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes: list[str], call: str
) -> None:
    """The first difference is reported at the call with the fault, whose arguments were the same."""
    monkeypatch.chdir(right)
    run("wrong", [*COMPARE, *changes])
    told = [each.getMessage() for each in caplog.records if "differs from" in each.getMessage()]
    assert f"{call}: " in told[0], told[0]
    assert "its arguments were the same" in told[0]


@pytest.mark.long
def test_without_a_fault(right: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(right)
    run("again", COMPARE)
    assert [each.getMessage() for each in caplog.records if "differs from" in each.getMessage()] == []


CHECKED = [
    ("StaleWeights", "embed_tokens", 3),  # The first step learns nothing, as all answers score the same.
    ("OneRanksShard", "up_proj", 1),
    ("Swapped", "q_proj", 1),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "words", "lines"), CHECKED)
def test_checked(right: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str, lines: int) -> None:
    """`check_weights` raises at the sync whose weights are wrong, and the error names a wrong tensor."""
    monkeypatch.chdir(right)
    with pytest.raises(WeightsDifferError) as caught:
        run("wrong", [*with_role("rollout", name), "+job.with.check_weights=1"])
    assert words in str(caught.value)
    last = max((right / "runs").glob("wrong*"), key=lambda folder: folder.stat().st_ctime)
    assert len((last / "metrics.jsonl").read_text().splitlines()) == lines


@pytest.mark.long
def test_another_seed(right: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of a run with another seed is refused."""
    monkeypatch.chdir(right)
    replay: dict[str, Any] = {"rollout": "runs/right"}
    with pytest.raises(colocate.ColocateError, match="seed"):
        run("wrong", [f"replay={json.dumps(replay)}", "seed=7"])
