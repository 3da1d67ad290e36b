"""`docs/examples/grpo-vllm.yaml` learns with vLLM beside the trainer, and doesn't with shuffled rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

import colocate

pytest.importorskip("vllm")
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "grpo-vllm.yaml"


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_example(shuffled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 30 steps the reward rises, unless rewards are shuffled, and trainer and engine agree in each step."""
    monkeypatch.chdir(tmp_path)
    changes = ["+job.with.shuffle_rewards=true"] if shuffled else []
    with colocate.launch(colocate.load_config(EXAMPLE, set=changes)) as job:
        rows = job.run(quiet=True).metrics
    assert [row["step"] for row in rows] == [*range(31)]
    start, last = rows[0]["eval_score"], sum(row["reward"] for row in rows[-3:]) / 3
    assert start < 0.5
    assert last < start + 0.1 if shuffled else last >= 0.75
    assert max(row["engine_gap"] for row in rows[1:]) <= 5e-5


def test_beside_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an actor in FSDP2 shards on two ranks, the engine in each slot has whole weights in each step."""
    monkeypatch.chdir(tmp_path)
    changes = ["pools.main.slots=2", "+groups.policy.roles.actor.with.parallel=fsdp2"]
    changes += ["job.with.warm_up_steps=2", "job.with.steps=2", "job.with.batch=8", "job.with.samples=4"]
    with colocate.launch(colocate.load_config(EXAMPLE, set=changes)) as job:
        rows = job.run(quiet=True).metrics
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["policy_grad_norm"] > 0 for row in rows[1:])
    assert max(row["engine_gap"] for row in rows[1:]) <= 5e-5
