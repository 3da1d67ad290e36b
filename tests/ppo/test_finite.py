"""A number that isn't finite reaches no weight and no checkpoint, and the error names its place."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance.shared import cluster
from tests.ppo import test_job
from tests.ppo.judged import Judged, Spoiled, WholeBatchReward
from tests.ppo.stored import tensors_of
from tests.ppo.test_grpo import ENGINE, TINY
from tests.ppo.test_job import EXAMPLES

import colocate
from colocate import RoleError
from colocate_ppo.actor import Actor
from colocate_ppo.critic import Critic
from colocate_ppo.rollout import Rollout
from colocate_ppo.task import Problem, Problems

SMALL: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32}
BAD = [math.nan, math.inf, -math.inf, None, "0.5", 1e39, 10**400, np.float32("nan"), torch.tensor(math.nan), [0.5, 1]]


@pytest.fixture
def rollout(actor: Actor) -> Rollout:
    entry = {"question": "", "answer": ""}
    problems = Problems.from_list(Problem(f"{name}: ", "a", entry) for name in ("first", "second", "third"))
    return actor.generate(problems, max_new_tokens=3)


@pytest.mark.parametrize("score", BAD, ids=lambda score: repr(score)[:20])
def test_a_score_that_is_no_number(monkeypatch: pytest.MonkeyPatch, rollout: Rollout, score: Any) -> None:
    """A score that is no finite number is refused, and the error names row, score and answer."""
    monkeypatch.setattr(Judged, "score_of_second", score)
    with pytest.raises(ValueError, match=r"gives row 1 the score .* no finite number: the answer '.*' to 'second: '"):
        Judged().score(rollout)


@pytest.mark.parametrize("score", [0, 1, True, np.float64(0.5), np.bool_(True), torch.tensor(0.5), -3e38], ids=repr)
def test_a_score_that_is_one(monkeypatch: pytest.MonkeyPatch, rollout: Rollout, score: Any) -> None:
    monkeypatch.setattr(Judged, "score_of_second", score)
    assert Judged().score(rollout).tolist() == pytest.approx([0.25, float(score), 0.25])


def test_scores_of_a_whole_batch(rollout: Rollout) -> None:
    """`summary`, which every job calls, refuses a NaN from a reward with its own `score`."""
    reward = WholeBatchReward()
    with pytest.raises(ValueError, match=r"gives row 2 the score nan, .* to 'third: '"):
        reward.summary(rollout, reward.score(rollout))


ALL = ["threads", *(pytest.param(name, marks=pytest.mark.long) for name in ("processes", "ray", "dask"))]


@pytest.fixture(scope="module", params=ALL)
def executor(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Return the executor's entry in a config."""
    if request.param in ("threads", "processes"):
        yield {"use": "local", "with": {"processes": request.param == "processes"}}
        return
    pytest.importorskip("distributed" if request.param == "dask" else "ray")
    with cluster(request.param) as options:
        yield {"use": request.param, "with": options}


@pytest.mark.parametrize(("job", "how"), [("grpo", "retry"), ("grpo", "restore"), ("grpo", "fail"), ("ppo", "retry")])
def test_a_run_ends_before_the_update(
    executor: dict[str, Any], job: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score of NaN ends the run with the reward's error, and the last checkpoint, of step 3, has finite weights."""
    if (job, how) != ("grpo", "retry") and executor["use"] != "local":
        pytest.skip("as on the others")
    monkeypatch.chdir(tmp_path)
    changes = [*TINY, *ENGINE] if job == "grpo" else [*test_job.TINY]
    changes += ["groups.policy.roles.reward=tests.ppo.judged:Failing", f"executor={json.dumps(executor)}"]
    changes += ["job.with.eval_problems=1", "job.with.eval_every=0", "job.with.checkpoint_every=1", "name=judged"]
    changes += [f"+job.with.on_step_failure={how}", "job.with.steps=20"]
    config = colocate.load_config(EXAMPLES / ("grpo.yaml" if job == "grpo" else "ppo-small.yaml"), set=changes)
    with pytest.raises(RoleError, match=r"role 'reward' gives row \d+ the score nan"), colocate.launch(config) as run:
        run.run(quiet=True)
    (last, *_) = sorted(Path("runs/judged/checkpoints").glob("step-*"), reverse=True)
    assert last.name == "step-000003"
    assert all(tensor.isfinite().all() for tensor in tensors_of(last / "policy" / "actor").values())


def spawn(parallel: str, **options: Any) -> colocate.ColocatedGroup:
    role: Any = colocate.role
    roles: dict[str, Any] = {
        "actor": role(Spoiled, **SMALL, lr=1e-2, parallel=parallel, **options),
        "critic": role(Critic, parallel=parallel, **options),
    }
    return colocate.spawn(roles, slots=2, processes=True)


def learn(actor: Any, problems: Problems, advantages: torch.Tensor, number: int) -> Any:
    rollout = actor.sample(problems, 2, 3, number=0)
    log_probs = actor.log_probs(rollout)
    return actor.learn(rollout, log_probs, advantages, None, None, minibatch=4, number=number)


@pytest.mark.in_make_test("nan-none", "nan-ddp", "inf-fsdp2")
@pytest.mark.parametrize("parallel", ["none", "ddp", "fsdp2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_bad_advantage_fails_update(parallel: str, bad: float, problems: Problems) -> None:
    """A bad advantage in one row fails the update; weights stay finite, and the next update succeeds."""
    good = torch.tensor([1.0, -1.0] * 4)
    spoiled = good.clone()
    spoiled[-1] = bad
    with spawn(parallel) as group:
        actor = group.role("actor", Spoiled)
        before = actor.numbers()
        with pytest.raises(RoleError, match=r"makes no update: in `learn` of step 1, minibatch \d") as caught:
            learn(actor, problems[:4], spoiled, 1)
        assert isinstance(caught.value.__cause__, FloatingPointError)
        assert learn(actor, problems[:4], good, 2)["policy_grad_norm"] > 0
        assert all(math.isfinite(number) for rank in actor.numbers() for number in rank)
        assert actor.numbers() != before


@pytest.mark.parametrize("parallel", ["none", "fsdp2"])
def test_updates_that_are_left_out(parallel: str, problems: Problems) -> None:
    """With `skip_nonfinite` a bad update is skipped, counted and left out of the averages."""
    spoiled = torch.tensor([1.0, -1.0] * 4)
    spoiled[-1] = math.nan
    with spawn(parallel, skip_nonfinite=True) as group:
        actor = group.role("actor", Spoiled)
        before = actor.numbers()
        told = learn(actor, problems[:4], spoiled, 1)
        assert told["policy_skipped"] == 1
        assert math.isfinite(told["policy_loss"])
        assert all(math.isfinite(number) for rank in actor.numbers() for number in rank)
        assert actor.numbers() != before
        told = learn(actor, problems[:4], torch.full((8,), math.nan), 2)
        assert told["policy_skipped"] == 2
        assert math.isnan(told["policy_loss"])
        assert "policy_skipped" not in learn(actor, problems[:4], torch.ones(8), 3)


def test_the_critic_too(actor: Actor, problems: Problems) -> None:
    rollout = actor.generate(problems, max_new_tokens=3)
    for skips in (False, True):
        critic = Critic(skip_nonfinite=skips)
        critic.load(actor.weights())
        values = critic.values(rollout)
        estimates: Any = {"advantages": values, "returns": torch.full_like(values, math.inf)}
        if skips:
            assert critic.update(rollout, values, estimates)["value_skipped"] == 1
        else:
            with pytest.raises(FloatingPointError, match="makes no update: in `update`, minibatch 0"):
                critic.update(rollout, values, estimates)
        assert all(parameter.isfinite().all() for parameter in critic.model.module.parameters())


@pytest.mark.parametrize("parallel", ["none", "fsdp2"])
@pytest.mark.parametrize("waits", [True, False])
def test_no_checkpoint_of_weights_that_are_not_finite(parallel: str, waits: bool, tmp_path: Path) -> None:
    """NaN weights aren't saved, and the checkpoint before them can be restored."""
    folder = tmp_path / "checkpoint"
    with spawn(parallel) as group:
        actor, critic = group.role("actor", Spoiled), group.role("critic", Critic)
        critic.load(actor.weights())
        group.checkpoint(folder)
        actor.spoil()
        with pytest.raises(RoleError, match=r"writes no checkpoint: weights aren't finite"):
            group.checkpoint(folder, wait=waits)
        group.restore(folder)
        assert all(math.isfinite(number) for rank in actor.numbers() for number in rank)


def test_logits_that_are_no_numbers(problems: Problems) -> None:
    """An actor whose logits are NaN refuses to sample, greedily or not."""
    actor = Spoiled(**SMALL)
    actor.spoil()
    with torch.no_grad():
        for parameter in actor.model.module.parameters():
            parameter.mul_(math.nan)
    for greedy in (False, True):
        with pytest.raises(FloatingPointError, match="logits are no numbers"):
            actor.generate(problems, max_new_tokens=3, greedy=greedy)
