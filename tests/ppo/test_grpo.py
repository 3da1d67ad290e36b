"""The job `grpo.train` learns, by the actor's own sampling or an engine's, and a resumed run continues its curve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import ruamel.yaml as yaml
import torch
from hypothesis import given as drawn, settings, strategies as st
from tests.docs.blocks import blocks_of
from tests.ppo.test_job import EASY, EXAMPLES, Recorder

import colocate
from colocate import MoveRecord
from colocate_ppo import maths
from colocate_ppo.actor import Actor
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.grpo import train
from colocate_ppo.model import make_small_llama
from colocate_ppo.parallel import split_evenly
from colocate_ppo.reference import Reference
from colocate_ppo.task import Problems
from colocate_ppo.tokenizer import make_character_tokenizer

PHRASE = "Spell this word backward (example: sun -> nus): "
TINY = [
    "groups.policy.roles.actor.with={layers: 1, hidden: 16, heads: 2, feed_forward: 32, warm_up_lr: 1e-2, lr: 1e-3}",
    "job.with={task_options: {min_word_len: 3, max_word_len: 3}, warm_up_steps: 4, warm_up_batch: 8, steps: 4,"
    " batch: 4, samples: 4, minibatch: 8, epochs: 2, eval_every: 2, eval_problems: 16, checkpoint_every: 2}",
]
KL = ["+groups.policy.roles.reference=ppo.reference", "+job.with.kl_coefficient=0.02"]
TRAINED = [*EASY, "job.with.steps=12", "+job.with.eval_every=12"]
STALE = ["+groups.policy.roles.rollout.background=true", "+job.with.staleness=1"]
PROCESSES = ["executor.with.processes=true"]  # Roles can sleep only in processes.
BUDGET = ["groups.policy.residency=swap", "groups.policy.device_memory=575KiB"]  # All roles take 634 KiB.
SMALL: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "feed_forward": 64}
ENGINE = ["+job.with.rollout=rollout"]


def engine(**sizes: Any) -> list[str]:
    """Return the config changes for an engine that has a model of its own, with these sizes."""
    tokenizer = make_character_tokenizer(sizes.pop("phrases", ()))
    config = make_small_llama(tokenizer, **sizes).to_dict()
    model = {key: value for key, value in config.items() if isinstance(value, int | str)}
    use = {"use": "rollout.engine", "with": {"engine": "transformers", "model": model, "max_length": 64}}
    return [f"groups.policy.roles.rollout={use}"]


OWN = [*engine(layers=1, hidden=16, heads=2, feed_forward=32), *ENGINE]


LARGER = engine(layers=2, hidden=64, heads=4, feed_forward=128, phrases=[PHRASE])


def run(changes: Iterable[str], directory: Path, *observers: object, **how: Any) -> Recorder:
    config = colocate.load_config(EXAMPLES / "grpo.yaml", set=list(changes))
    assert config.job is not None
    with colocate.launch(config) as job:
        for observer in observers:
            job.runtime.observe(observer)
        recorder = Recorder(job.runtime, job.groups, directory, **how)
        train(recorder, **config.job.with_)  # type: ignore[arg-type]
    return recorder


class Moved:
    """An observer that records which roles sleep and wake."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, str]] = []

    def colocate_memory_moved(self, record: MoveRecord) -> None:
        self.moves.append((record.role, record.kind))


@pytest.mark.parametrize(
    ("baseline", "wanted"),
    [
        # The scores 1, 0, 0 have leave-one-out means of 0, 1/2, 1/2, and a deviation of sqrt(1/3).
        ("leave_one_out", [1.0, -0.5, -0.5, 0.0, 0.0, 0.0]),
        ("normalised", [2 / 3 / (3**-0.5 + 1e-4), *[-1 / 3 / (3**-0.5 + 1e-4)] * 2, 0.0, 0.0, 0.0]),
    ],
)
def test_advantages_over_the_other_answers(baseline: Any, wanted: list[float]) -> None:
    scores = torch.tensor([1.0, 0.0, 0.0, 0.7, 0.7, 0.7])
    assert maths.group_advantages(scores, 3, baseline).tolist() == pytest.approx(wanted, abs=1e-6)


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="'median': there are leave_one_out and normalised"):
        maths.group_advantages(torch.zeros(4), 2, "median")  # type: ignore[arg-type]


def test_weights_are_truncated() -> None:
    weights = maths.importance_weights(torch.tensor([0.5, 0.2, 0.9]).log(), torch.tensor([0.5, 0.4, 0.1]).log(), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.0])


@settings(deadline=None)
@drawn(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 9), st.integers(1, 3))
def test_minibatches_have_as_many_tokens(tokens: list[int], k: int, epochs: int) -> None:
    """An epoch's minibatches have equally many tokens, up to one row, and use every row once."""
    lengths = torch.tensor(tokens, dtype=torch.int64)
    batches = split_evenly(lengths, k, epochs)
    assert len(batches) == k * epochs
    for epoch in range(epochs):
        own = batches[epoch * k : (epoch + 1) * k]
        assert sorted(row for batch in own for row in batch.tolist()) == [*range(len(tokens))]
        sums = [int(lengths[batch].sum()) for batch in own]
        assert max(sums) - min(sums) <= max(tokens, default=0)


@attrs.frozen
class Sampled:
    """An answer as an engine returns it."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


def learn(actor: GroupActor, reference: Reference, problems: Problems, weights: Any) -> Any:
    """Run two epochs of updates from given weights and answers; nothing in it is random."""
    actor.load(weights)
    reference.load(weights)
    ids = actor.prompts(problems)
    assert [len(each) for each in ids] == [len(text) + 1 for text in problems.questions]  # No phrase is one token here.
    answers = [
        tuple(Sampled(tuple(each[: 1 + (row + sample) % 5]), (-1.5,) * (1 + (row + sample) % 5)) for sample in range(2))
        for row, each in enumerate(ids)
    ]
    rollout = actor.read(problems, answers, 6)
    tokens = actor.lengths(rollout)
    assert tokens == [len(each.token_ids) for group in answers for each in group]
    scores = torch.arange(len(tokens), dtype=torch.float32) % 3
    advantages = actor.advantages(scores, 2)
    log_probs, refers = actor.log_probs(rollout), reference.log_probs(rollout)
    told = actor.learn(
        rollout, log_probs, advantages, tokens, refers, minibatch=99, epochs=2, kl_coefficient=0.1, clip=0.3
    )
    return told, log_probs, actor.log_probs(rollout)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[colocate.ColocatedGroup]:
    roles: dict[str, colocate.RoleSpec[Any]] = {
        "actor": colocate.role(GroupActor, **SMALL, parallel="fsdp2"),
        "reference": colocate.role(Reference),
    }
    with (
        colocate.connect("local", processes=True) as runtime,
        runtime.reserve(slots=2) as pool,
        pool.spawn(roles, name="policy") as group,
    ):
        yield group


def test_two_ranks_learn_like_one_rank(two_ranks: colocate.ColocatedGroup, problems: Problems) -> None:
    """Two ranks with FSDP2 shards, and rows balanced by tokens, learn what one rank learns."""
    alone = GroupActor(**SMALL)
    weights = alone.weights()
    wanted = learn(alone, Reference(), problems[:7], weights)
    views = two_ranks.role("actor", GroupActor), two_ranks.role("reference", Reference)
    found = learn(*views, problems[:7], weights)
    assert found[0] == pytest.approx(wanted[0], rel=1e-3, abs=1e-5)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found[1], found[2], atol=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """Run the job too briefly to learn anything."""
    return run([*TINY, *OWN, *KL], tmp_path_factory.mktemp("tiny"))


def test_every_step_is_logged(tiny: Recorder) -> None:
    """Every step is logged, and an engine has the trainer's log-probabilities."""
    assert [row["step"] for row in tiny.rows] == [0, 1, 2, 3, 4]
    wanted = {"reward", "kl", "policy_loss", "entropy", "informative", "engine_gap", "engine_weight"}
    assert all(wanted <= row.keys() for row in tiny.rows[1:])
    assert max(row["engine_gap"] for row in tiny.rows[1:]) < 1e-4
    assert {row["engine_truncated"] for row in tiny.rows[1:]} == {0.0}
    assert [row["step"] for row in tiny.rows if "eval_accuracy" in row] == [0, 2, 4]
    # Learning starts in the first step in which an answer is better than the others.
    learned = [row["informative"] > 0 for row in tiny.rows[1:]]
    assert any(learned[:-1])
    assert [row["kl"] > 1e-7 for row in tiny.rows[1:]] == [any(learned[:step]) for step in range(4)]


def test_resumed_run_logs_same_numbers(tiny: Recorder, tmp_path: Path) -> None:
    """A resumed run, whose engine has no weights yet, logs the same numbers to the last bit."""
    changes = [*TINY, *OWN, *KL]
    first = run(changes, tmp_path, stop_after=7)
    second = run(changes, tmp_path, resumed=first.resumed)
    assert [row["step"] for row in first.rows] == [0, 1, 2]
    assert [*first.rows, *second.rows] == tiny.rows


def test_the_engine_shares_the_actors_module(tmp_path: Path) -> None:
    """An engine that shares the actor's module agrees with it, and its cache sleeps while the actor learns."""
    moved = Moved()
    recorder = run([*TINY, *ENGINE, *PROCESSES, "+job.with.rollout_sleeps=[cache]"], tmp_path, moved)
    assert [row["step"] for row in recorder.rows] == [0, 1, 2, 3, 4]
    # The engine wakes for each of three more generations, and shortly in each of two checkpoints.
    assert [kind for role, kind in moved.moves if role == "rollout"] == ["sleep", "wake"] * 5 + ["sleep"]
    assert max(row["engine_gap"] for row in recorder.rows[1:]) < 1e-4


def test_staleness(tiny: Recorder, tmp_path: Path) -> None:
    """With staleness answers are one update older, and a resumed run draws the problems that come next."""
    whole = run([*TINY, *OWN, *KL, *STALE], tmp_path / "whole")
    first = run([*TINY, *OWN, *KL, *STALE], tmp_path / "parts", stop_after=7)
    second = run([*TINY, *OWN, *KL, *STALE], tmp_path / "parts", resumed=first.resumed)
    for rows in (whole.rows, [*first.rows, *second.rows]):
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert [row["reward"] for row in rows[1:3]] == [row["reward"] for row in tiny.rows[1:3]]
    # The first update is in the second step, and the answers of the third step were drawn before it.
    assert [row["engine_gap"] > 1e-4 for row in whole.rows[1:]] == [False, False, True, True]
    assert [row["engine_gap"] > 1e-4 for row in second.rows] == [False, True]  # A resumed run has drawn nothing ahead.
    positions = [json.loads((path / "progress.json").read_text())["position"] for path in tmp_path.glob("*/[24]")]
    assert len(positions) == 4
    assert len({*positions}) == 2


def test_staleness_of_the_example(tmp_path: Path) -> None:
    """With staleness an engine that names the actor logs the same as an engine with a model of its own."""
    found = run([*TINY, *ENGINE, *STALE], tmp_path / "example")
    assert found.rows == run([*TINY, *OWN, *STALE], tmp_path / "own").rows


@pytest.mark.long
def test_turns_within_a_budget(tmp_path: Path) -> None:
    """Actor and engine take turns within a budget too small for both, and the metrics are unchanged."""
    moved = Moved()
    assert run([*TINY, *OWN, *PROCESSES, *BUDGET], tmp_path, moved).rows == run([*TINY, *OWN], tmp_path).rows
    assert {("actor", "sleep"), ("rollout", "wake")} <= {*moved.moves}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [["job.with.rollout=actor"], LARGER, [*LARGER, *STALE]], ids=["actor", "engine", "stale"]
)
def test_grpo_improves(tmp_path: Path, changes: list[str]) -> None:
    trained = run([*TRAINED, *changes], tmp_path)
    assert trained.rows[0]["eval_accuracy"] < 0.35
    assert trained.rows[-1]["eval_accuracy"] > 0.65
    assert trained.rows[-1]["reward"] > trained.rows[1]["reward"] + 0.2


@pytest.mark.long
@pytest.mark.parametrize("changes", [["job.with.rollout=actor"], LARGER], ids=["actor", "engine"])
def test_shuffled_rewards_keep_score_low(tmp_path: Path, changes: list[str]) -> None:
    control = run([*TRAINED, *changes, "+job.with.shuffle_rewards=true"], tmp_path)
    assert control.rows[-1]["eval_score"] < control.rows[0]["eval_score"] + 0.1
    assert control.rows[-1]["eval_accuracy"] < 0.35


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": 1}, "samples: must be 2 or more, as answers are compared, not 1"),
        (
            {"kl_coefficient": 0.1},
            "kl_coefficient: above 0 needs a role 'reference' (`reference: ppo.reference`) in the group 'policy', "
            "which has actor, rollout, reward",
        ),
        (
            {"rollout": "rolout"},
            "rollout: names no role in the group 'policy', which has actor, rollout, reward; did you mean 'rollout'?",
        ),
        (
            {"rollout": "rollout", "staleness": 1},
            "staleness: has the role 'rollout' generate while the actor learns, so it needs `background: true` in the "
            "config",
        ),
        (
            {"rollout": "rollout", "staleness": 1, "rollout_sleeps": ["cache"]},
            "staleness: has the role 'rollout' generate while the actor learns, so it mustn't sleep (`rollout_sleeps`)",
        ),
        ({"staleness": 1}, "staleness: needs a role with an engine that generates; `rollout` is the actor"),
        (
            {"rollout_sleeps": ["cache"]},
            "rollout_sleeps: is for a role that only generates; `rollout` is the actor",
        ),
        (
            {"check_weights": 10},
            "check_weights: is for a role that only generates; `rollout` is the actor",
        ),
        ({"rollout": "rollout", "check_weights": -1}, "check_weights: must be 0 or more, not -1"),
        ({"batch": -1}, "batch: must be 1 or more, not -1"),
        ({"rollout": "reward"}, "rollout: names a role without generate and load_weights; `rollout.engine` has both"),
        ({"group": "polcy"}, "group: must name the group to train in; the config has policy"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    """An option that doesn't fit is refused when its config is loaded, with its path and the reason."""
    config: Any = yaml.YAML(typ="safe").load(EXAMPLES / "grpo.yaml")
    config["job"]["with"] = given
    with pytest.raises(colocate.ConfigError) as caught:
        colocate.load_config(config)
    assert [str(each) for each in caught.value.mistakes] == [f"job.with.{words}"]


def test_roles_that_do_not_fit() -> None:
    """A role of a wrong class, or with an option that the job sets, is refused."""
    changes = ["groups.policy.roles.reward={use: 'colocate_rollout.testing:Trainer', with: {model: {}}}"]
    with pytest.raises(colocate.ConfigError, match=r"'reward' of .*:Trainer in 'policy', where a subclass of"):
        colocate.load_config(EXAMPLES / "grpo.yaml", set=changes)
    changes = ["+groups.policy.roles.rollout.with.sampling={temperature: 0.5, top_p: 0.9}"]
    with pytest.raises(colocate.ConfigError, match=r"temperature in .*: remove it there, and set `temperature` of"):
        colocate.load_config(EXAMPLES / "grpo.yaml", set=changes)


def test_train_refuses_unfit_options(tmp_path: Path) -> None:
    """`train` refuses options that don't fit when it is called without a config."""
    config = colocate.load_config(EXAMPLES / "grpo.yaml", set=TINY[:1])
    with colocate.launch(config) as job:
        with pytest.raises(colocate.ConfigError, match=r"^grpo.train: option `samples` must be 2 or more, .*, not 1$"):
            train(Recorder(job.runtime, job.groups, tmp_path), samples=1)  # type: ignore[arg-type]
        with pytest.raises(colocate.ConfigError, match=r"option `staleness` .* needs `background: true` in"):
            train(Recorder(job.runtime, job.groups, tmp_path), rollout="rollout", staleness=1)  # type: ignore[arg-type]


def test_an_engine_without_room(tmp_path: Path) -> None:
    """An engine without room for an answer fails the run, and the error names `max_length`."""
    changes = [*TINY, *engine(layers=1, hidden=16, heads=2, feed_forward=32), *ENGINE]
    with pytest.raises(colocate.RoleError, match="raise max_length of its role"):
        run([*changes, "groups.policy.roles.rollout.with.max_length=4"], tmp_path)


def test_a_ppo_actor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(colocate.ColocateError, match="GroupActor"):
        run([TINY[0], "groups.policy.roles.actor.use=ppo.actor"], tmp_path)
    assert issubclass(GroupActor, Actor)


@pytest.mark.long
def test_questions_and_scores_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollouts page's example learns: its reward rises from below 0.1 to above 0.4."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks_of(EXAMPLES.parent / "rollouts.md"):
        if block.file in ("vowels.py", "vowels.yaml"):
            Path(block.file).write_text(block.text)
    with colocate.launch(colocate.load_config("vowels.yaml")) as job:
        job.run(quiet=True)
    lines = [json.loads(line) for line in Path("runs/vowels/metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert rewards[0] < 0.1 < 0.4 < rewards[-1]
