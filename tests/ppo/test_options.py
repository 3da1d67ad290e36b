"""Option values that would spoil a run are refused by name, in a config and in Python."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import ruamel.yaml as yaml
from tests.ppo.test_grpo import TINY, Sampled
from tests.ppo.test_job import EXAMPLES, Recorder

import colocate
from colocate_ppo import grpo, job as ppo
from colocate_ppo.actor import Actor
from colocate_ppo.critic import Critic
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.task import Problem, Problems

NAN, INF = math.nan, math.inf
BOTH: dict[str, list[float]] = {
    "max_new_tokens": [0, -1],
    "warm_up_steps": [-1],
    "warm_up_batch": [0],
    "warm_up_ramp": [-1],
    "flawed": [-0.1, 1.5, NAN],
    "steps": [-1],
    "batch": [0, -1],
    "minibatch": [0],
    "epochs": [0],
    "temperature": [0, 0.0, -1, NAN, INF],
    "clip": [0, -0.2, NAN],
    "kl_coefficient": [-0.1, NAN, INF],
    "actor_ramp": [-1],
    "actor_decay": [-1, 2, NAN],
    "eval_every": [-1],
    "eval_problems": [0],
    "checkpoint_every": [-1],
    "step_retries": [-1],
}
OF_GRPO = BOTH | {"samples": [1, 0, -1], "importance_cap": [0, -1, NAN], "check_weights": [-1]}
OF_PPO: dict[str, list[float]] = BOTH | {
    "gamma": [-0.1, 1.1, NAN],
    "lam": [-0.1, 1.1, NAN],
    "value_clip": [0, -1, NAN],
    "entropy_coefficient": [-1, NAN, INF],
    "critic_only_steps": [-1],
}
OF_ACTOR: dict[str, list[float]] = {
    "lr": [0, -1e-4, NAN, INF],
    "warm_up_lr": [0, -1, NAN, INF],
    "max_grad_norm": [0, -1, NAN],
    "layers": [0],
    "hidden": [0, 66],
    "heads": [0],
    "feed_forward": [0],
    "threads": [0, -1],
}
OF_CRITIC: dict[str, list[float]] = {"lr": [0, -1, NAN, INF], "max_grad_norm": [0, NAN]}
OF_ENGINE: dict[str, Any] = {
    "max_rows": [0, -1],
    "max_length": [0],
    "max_batch_tokens": [0],
    "sampling": [{"top_p": -0.5}, {"top_p": NAN}, {"top_k": -1}, {"top_p": INF}],
}


CONFIG = """
pools: {{main: {{slots: 1}}}}
groups:
  policy:
    pool: main
    roles:
      actor: {{use: {kind}.actor, with: {actor}}}
      rollout: {{use: rollout.engine, with: {engine}}}
      critic: {{use: ppo.critic, with: {critic}}}
      reference: ppo.reference
      reward: ppo.reward
job: {{use: {kind}.train, with: {job}}}
"""
PLACES = {"actor": "groups.policy.roles.actor", "engine": "groups.policy.roles.rollout"}
PLACES |= {"critic": "groups.policy.roles.critic", "job": "job"}


class Counter(Recorder):
    """A run that records how many steps its job plans."""

    most = 0

    def progress(self, done: int, total: int) -> None:
        self.most = total


def cases(options: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, each, id=f"{name}={each}") for name, values in options.items() for each in values]


def written(value: Any) -> str:
    """Return a value as YAML text."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {written(each)}" for name, each in value.items()) + "}"
    return {"nan": ".nan", "inf": ".inf"}.get(str(value), str(value))


def only_mistake(kind: str, place: str, name: str, value: Any) -> str:
    """Return the message of a config's only mistake, which must be at this option."""
    options: dict[str, dict[str, Any]] = {
        "actor": {"hidden": 64},
        "engine": {"engine": "transformers", "role": "actor"},
        "critic": {},
        "job": {},
    }
    options[place][name] = value
    parts = {part: written(given) for part, given in options.items()}
    with pytest.raises(colocate.ConfigError) as caught:
        colocate.load_config(yaml.YAML(typ="safe").load(CONFIG.format(kind=kind, **parts)))
    (mistake,) = caught.value.mistakes
    assert mistake.path == f"{PLACES[place]}.with.{name}"
    return mistake.message


@pytest.mark.parametrize(("name", "value"), cases(OF_GRPO))
def test_grpo(name: str, value: Any) -> None:
    assert only_mistake("grpo", "job", name, value).startswith("must be")


@pytest.mark.parametrize(("name", "value"), cases(OF_PPO))
def test_ppo(name: str, value: Any) -> None:
    assert only_mistake("ppo", "job", name, value).startswith("must be")


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
@pytest.mark.parametrize(("name", "value"), cases(OF_ACTOR))
def test_actors(kind: str, name: str, value: Any) -> None:
    """A bad option of an actor is refused in a config and in Python."""
    assert only_mistake(kind, "actor", name, value).startswith("must be")
    with pytest.raises(colocate.ConfigError, match=f"option `{name}` must be"):
        (GroupActor if kind == "grpo" else Actor)(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(OF_CRITIC))
def test_critic(name: str, value: Any) -> None:
    assert only_mistake("ppo", "critic", name, value).startswith("must be")
    with pytest.raises(colocate.ConfigError, match=f"option `{name}` must be"):
        Critic(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(OF_ENGINE))
def test_engine(name: str, value: Any) -> None:
    assert re.match("must be a whole number from 1|Sampling refuses it", only_mistake("grpo", "engine", name, value))


def test_infinity_means_no_limit() -> None:
    """Options that limit something accept infinity, which means no limit."""
    job = {"clip": math.inf, "importance_cap": math.inf}
    parts = {"actor": "{max_grad_norm: .inf}", "engine": "{engine: transformers, role: actor}", "critic": "{}"}
    colocate.load_config(yaml.YAML(typ="safe").load(CONFIG.format(kind="grpo", job=written(job), **parts)))


def test_line(tmp_path: Path) -> None:
    """A mistake in a config file is reported with its line."""
    parts = {"actor": "{}", "engine": "{engine: transformers, role: actor}", "critic": "{}"}
    (tmp_path / "t.yaml").write_text(CONFIG.format(kind="grpo", job="{\n  steps: 3,\n  temperature: 0}", **parts))
    with pytest.raises(colocate.ConfigError, match=r"line 14: job\.with\.temperature: must be a finite number above 0"):
        colocate.load_config(tmp_path / "t.yaml")


def test_jobs_called_in_python(tmp_path: Path) -> None:
    """A job called in Python refuses the option values that a config refuses."""
    config = colocate.load_config(EXAMPLES / "grpo.yaml", set=TINY[:1])
    with colocate.launch(config) as launched:
        run: Any = Recorder(launched.runtime, launched.groups, tmp_path)
        jobs: Any = {"grpo.train": grpo.train, "ppo.train": ppo.train}
        for name, value in (("temperature", 0), ("clip", math.nan), ("importance_cap", 0), ("steps", -1)):
            with pytest.raises(colocate.ConfigError, match=f"^grpo.train: option `{name}` must be"):
                jobs["grpo.train"](run, **{name: value})
            if name != "importance_cap":
                with pytest.raises(colocate.ConfigError, match=f"^ppo.train: option `{name}` must be"):
                    jobs["ppo.train"](run, **{name: value})


@pytest.mark.parametrize("example", ["grpo.yaml", "ppo-small.yaml"])
def test_no_warm_up_of_a_trained_model(example: str, tmp_path: Path) -> None:
    """A trained model has no warm-up by default, a new model has 500 steps, and a given number counts."""
    folder = str(tmp_path / "model")
    made: Any = Actor(layers=1, hidden=16, heads=2, feed_forward=32)
    made.model.module.save_pretrained(folder)
    made.tokenizer.inner.save_pretrained(folder)
    steps = []
    for model, given in ((folder, None), (None, None), (folder, 7)):
        changes = ["job.with={steps: 0, eval_problems: 1, max_new_tokens: 1}"]
        changes += [f"groups.policy.roles.actor.with.model={json.dumps(model)}", "checkpoints=null"]
        changes += [] if given is None else [f"+job.with.warm_up_steps={given}"]
        with colocate.launch(colocate.load_config(EXAMPLES / example, set=changes)) as launched:
            assert launched.config.job is not None
            run: Any = Counter(launched.runtime, launched.groups, tmp_path, stop_after=0)
            (grpo if example == "grpo.yaml" else ppo).train(run, **launched.config.job.with_)
            steps.append(run.most)
    assert steps == [0, 500, 7]


def test_a_question_without_room(tmp_path: Path) -> None:
    """A question too long for the model is refused with its text, its length and a remedy."""
    actor = GroupActor(layers=1, hidden=16, heads=2, feed_forward=32)
    long = Problems.from_list([Problem("q" * 600, "a", {}), Problem("short", "a", {})])
    with pytest.raises(colocate.ConfigError, match=r"the question 'qqq.* of 60\d tokens .* takes 512: give shorter"):
        actor.sample(long, 2, 3)
    empty, some = Sampled((), ()), Sampled((5,), (-1.0,))
    with pytest.raises(colocate.ConfigError, match=r"'qqq.* of \d+ tokens .*: raise max_length of its role"):
        actor.read(
            Problems.from_list([Problem("q" * 300, "a", {}), Problem("b", "a", {})]), [(some, empty), (some, some)], 3
        )
