"""The job `grpo.train`: a supervised warm-up, then GRPO, which compares several answers to the same question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import attrs

from colocate import ColocatedGroup, ConfigError, Resident, RoleSpec, Run, checks, inspect, sync_weights, wait
from colocate.texts import did_you_mean
from colocate_ppo.critic import Critic
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.maths import Baseline, KlEstimator
from colocate_ppo.options import AMOUNT, BOUND, Limit, refuse_options
from colocate_ppo.recovery import OnStepFailure
from colocate_ppo.reference import Reference
from colocate_ppo.reward import Reward
from colocate_ppo.task import Problems, Task
from colocate_ppo.team import Players
from colocate_ppo.training import Training, find_classes, find_group, option_problems, scale_actor_lr

_ACTOR = "actor"
_LIMITS: Mapping[str, Limit] = {"importance_cap": BOUND, "check_weights": AMOUNT}


@attrs.frozen(eq=False)
class GroupTeam(Players[GroupActor]):
    """The roles that the job `grpo.train` calls.

    Attributes:
        actor: `grpo.actor`.
        reward: `ppo.reward`.
        reference: `ppo.reference`, if there is one.
        rollout: The role that generates; None if the actor does.
        scope: The group's scope, whose end frees all residents kept inside.
        pipeline: The group's pipeline, whose end sends the calls made inside as one message.
    """

    actor: GroupActor
    reward: Reward
    reference: Reference | None
    rollout: Any
    scope: Callable[[], AbstractContextManager[Any]]
    pipeline: Callable[[], AbstractContextManager[Any]]

    @classmethod
    def from_group(cls, group: ColocatedGroup, rollout: str, refers: bool) -> GroupTeam:
        """Return the team of a group: actor, reward, optional reference, and the role that generates."""
        return cls(
            group.role(_ACTOR, GroupActor),
            group.role("reward", Reward),
            group.role("reference", Reference) if refers else None,
            None if rollout == _ACTOR else group.role(rollout),
            group.scope,
            group.pipeline,
        )

    @property
    def followers(self) -> Sequence[Critic | Reference]:
        """The roles that start from the actor's weights: the reference, if any."""
        return () if self.reference is None else (self.reference,)


def _check_options(
    options: Mapping[str, Any], groups: Mapping[str, Mapping[str, RoleSpec[Any]]]
) -> Iterable[tuple[str, str]]:
    group_name = options["group"]
    if len(named := [name for name in groups if group_name in (None, name)]) != 1:
        return [("group", f"must name the group to train in; the config has {', '.join(groups) or 'none'}")]
    roles, rollout = groups[named[0]], options["rollout"]
    problems = [*_option_problems(named[0], find_classes(roles), lambda role: roles[role].background, **options)]
    sampling = roles[rollout].kwargs.get("sampling") if rollout in roles else None
    instead = {
        "max_tokens": "`max_new_tokens` of the job",
        "temperature": "`temperature` of the job",
        "seed": "the run's seed",
        "stop_token_ids": "`stop` of the actor (evaluations use it, too)",
    }
    for name, decides in instead.items():
        if isinstance(sampling, Mapping) and name in sampling:
            problems.append(
                ("rollout", f"is a role with {name} in its `sampling`: remove it there, and set {decides} instead")
            )
    return problems


@checks(_check_options)
def train(
    run: Run,
    *,
    group: str | None = None,
    rollout: str = _ACTOR,
    rollout_sleeps: Sequence[Literal["weights", "cache"]] = (),
    staleness: Literal[0, 1] = 0,
    check_weights: int = 0,
    task: str = "spell_backward",
    task_options: Mapping[str, Any] | None = None,
    max_new_tokens: int | None = None,
    warm_up_steps: int | None = None,
    warm_up_batch: int = 64,
    warm_up_ramp: int = 20,
    flawed: float = 0.7,
    steps: int = 100,
    batch: int = 32,
    samples: int = 8,
    minibatch: int = 64,
    epochs: int = 1,
    temperature: float = 1.0,
    baseline: Baseline = "leave_one_out",
    clip: float = 0.2,
    kl_coefficient: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    importance_cap: float = 2.0,
    actor_ramp: int = 10,
    actor_decay: float = 0.5,
    shuffle_rewards: bool = False,
    eval_every: int = 10,
    eval_problems: int = 256,
    checkpoint_every: int = 20,
    checkpoint_waits: bool = True,
    on_step_failure: OnStepFailure = "retry",
    step_retries: int = 3,
    same_rows: bool = True,
) -> None:
    """Train an actor with GRPO on a task, in a group with the roles `actor` and `reward`.

    Args:
        run: The job's run: groups, log, checkpoints.
        group: The group's name; None if the config has only one.
        rollout: The role that generates: the actor itself, with its own module, or a role with an engine
            (`rollout.engine`), which gets the actor's weights at the beginning of each step.
        rollout_sleeps: Tags of an engine's memory that sleep while the actor learns.
        staleness: 1 lets an engine in a background role generate the answers of the next step while the actor learns
            from the present ones: with weights that are one update older.
        check_weights: Compare the engine's weights with the actor's bit by bit in every `check_weights`-th sync,
            beginning with the first; 0 for never.
        task: The name of a reasoning-gym dataset, or "module:function" for a function that returns a list of problems:
            mappings with a `question` and an `answer`. A tenth of the problems, by question, is held out for
            evaluation.
        task_options: Options of the dataset, or arguments of the function.
        max_new_tokens: The longest answer; None for two more than the characters of the longest right answer.
        warm_up_steps: Steps of supervised learning before GRPO; None for 500, or for 0 if the actor has a `model`,
            which is pretrained.
        warm_up_batch: Demonstrations in each warm-up step.
        warm_up_ramp: Steps until the warm-up's learning rate is reached; afterwards the rate falls linearly to 0.
        flawed: The fraction of demonstrations that are wrong on purpose, so that GRPO has something to improve.
        steps: GRPO steps.
        batch: Problems in each step.
        samples: Answers to each problem.
        minibatch: Answers in each optimizer step, on average: minibatches have about equally many tokens, on each rank.
        epochs: How often each answer is used.
        temperature: The temperature of the sampling.
        baseline: The baseline of a score: the mean of the other answers ("leave_one_out"), or mean and deviation of all
            ("normalised").
        clip: PPO's clip range: how far a probability ratio may move from 1 with a gain in the objective.
        kl_coefficient: The weight of the KL to the reference in the loss; above 0 the group has a role `reference`.
        kl_estimator: The estimator of that KL: "k1", "k2" or "k3" (`colocate_ppo.maths.kl_estimate`).
        importance_cap: The largest importance weight (actor's probability over the engine's) of a token sampled by an
            engine.
        actor_ramp: GRPO steps until the actor's learning rate is reached.
        actor_decay: The last part of all GRPO steps in which the learning rate falls linearly to 0.
        shuffle_rewards: A control experiment: permute the scores of a batch, so that nothing can be learned.
        eval_every: GRPO steps between evaluations, which are greedy answers to held-out problems; 0 evaluates before
            the first step and after the last one only.
        eval_problems: Problems in an evaluation.
        checkpoint_every: GRPO steps between checkpoints; 0 for one at the end only.
        checkpoint_waits: Whether the next step waits until a checkpoint is written. Otherwise roles copy their state to
            the host and write the files while steps go on.
        on_step_failure: What follows when a role raises in a step. "retry": repeat the failed part with the same rows
            and random numbers; completed updates aren't repeated. "restore": go back to the last checkpoint. "fail":
            end the job. If ranks are left with different weights, the group can't go on, and goes back to the
            checkpoint if the group has `on_failure: restart`.
        step_retries: How often the same part is repeated, or the same checkpoint is restored.
        same_rows: Whether a resumed run must have the same task rows, in the same order. Otherwise the run continues
            with different rows, at the same position.
    """
    options = {**locals()}
    workers = find_group(run, group, "grpo.train")
    _refuse_options(workers, **options)
    team = GroupTeam.from_group(workers, rollout, kl_coefficient > 0)
    actor, reward, reference, engine = team.actor, team.reward, team.reference, team.rollout
    training = Training(
        run,
        workers,
        team,
        task=task,
        task_options=task_options,
        max_new_tokens=max_new_tokens,
        warm_up_steps=warm_up_steps,
        warm_up_batch=warm_up_batch,
        warm_up_ramp=warm_up_ramp,
        flawed=flawed,
        steps=steps,
        eval_every=eval_every,
        eval_problems=eval_problems,
        checkpoint_every=checkpoint_every,
        checkpoint_waits=checkpoint_waits,
        on_step_failure=on_step_failure,
        step_retries=step_retries,
        same_rows=same_rows,
        job="grpo.train",
    )
    part, longest = training.run_part, training.longest
    several = inspect(actor).ranks > 1  # Several ranks get about equal numbers of tokens.
    # The engine gets the actor's end tokens, because an engine with another model may have different end tokens.
    ends = [] if engine is None else actor.ends()
    ahead: _Batch | None = None
    syncs = 0

    def draw(number: int) -> _Batch:
        question = _Batch.draw(number, training.problems, batch)
        if engine is not None:
            prompts = part("rollout", lambda: actor.prompts(question.problems))
            question.problems = attrs.evolve(question.problems, prompts=prompts)
        return question

    def generate(asked: _Batch) -> Any:
        assert engine is not None
        # The seed depends on the step's number, so that a repeated step generates the same responses.
        seed = (run.runtime.seed * 1_000_003 + asked.number) % (1 << 62)
        sampling = {"max_tokens": longest, "temperature": temperature, "seed": seed, "stop_token_ids": ends}
        return engine.generate.keep(asked.problems.prompts, samples=samples, sampling=sampling)

    def sync() -> None:
        nonlocal syncs
        check = check_weights > 0 and syncs % check_weights == 0
        part("sync", lambda: sync_weights(actor, engine, check=check, staleness=staleness))
        syncs += 1

    def step() -> dict[str, float]:
        nonlocal ahead
        number = training.progress.step
        now, ahead = ahead, None
        # Draw new problems if none were drawn ahead, or if the job has returned to an earlier step since.
        if now is None or (now.number, now.after) != (number, training.problems.position):
            now = draw(number)
            if staleness:
                sync()
                now.responses = generate(now)
        if engine is not None:
            sync()
        if staleness and number < steps:
            ahead = draw(number + 1)
            ahead.responses = generate(ahead)
        training.begins_at = None if ahead is None else ahead.before
        with team.scope():
            return learn(now)

    def learn(now: _Batch) -> dict[str, float]:
        number = now.number

        def roll_out() -> tuple[Any, ...]:
            # Use the responses only once, so that a repeated rollout generates new responses.
            responses, now.responses = now.responses, None
            with team.pipeline():
                if engine is None:
                    answered = actor.sample.keep(now.problems, samples, longest, temperature, number=number)
                else:
                    responses = responses or generate(now)
                    answered = actor.read.keep(now.problems, responses.ref, longest)
                scores = reward.score.keep(answered.ref)
                summary = reward.summary.submit(answered.ref, scores.ref)
                if shuffle_rewards:
                    scores = reward.shuffle.keep(scores.ref, number)
                lengths = actor.lengths.submit(answered.ref) if several else None
                advantages = actor.advantages.keep(scores.ref, samples, baseline)
                log_probs = actor.log_probs.keep(answered.ref, temperature)
                refers = kl = None
                if reference is not None:
                    reference_log_probs = reference.log_probs.keep(answered.ref, temperature)
                    kl = reference.kl.submit(answered.ref, log_probs.ref, reference_log_probs.ref, kl_estimator)
                    refers = reference_log_probs.ref
            # Raise a failure of the rollout here, and not in a later call that uses a failed resident.
            log_probs.wait()
            numbers = summary.result() if kl is None else {**summary.result(), "kl": kl.result()}
            tokens = None if lengths is None else lengths.result()
            return answered.ref, log_probs.ref, advantages.ref, tokens, refers, numbers

        answered, log_probs, advantages, tokens, refers, metrics = part("rollout", roll_out)
        if engine is not None and rollout_sleeps:
            part("sleep", lambda: workers.sleep(rollout, rollout_sleeps))

        def update() -> dict[str, float]:
            learned = actor.learn.submit(
                answered,
                log_probs,
                advantages,
                tokens,
                refers,
                minibatch,
                epochs,
                clip,
                kl_coefficient,
                kl_estimator,
                importance_cap,
                temperature,
                lr_scale=scale_actor_lr(number, steps, 0, actor_ramp, actor_decay),
                number=number,
            )
            wait([learned])
            return learned.result()

        results: dict[str, float] = metrics | part("update", update)
        return results

    training.run_training(step)


@attrs.define(eq=False)
class _Batch:
    """The problems drawn for one training step.

    Attributes:
        number: The step's number.
        problems: The problems; for an engine, with the token ids of each prompt.
        before: The position of the task's training stream before the draw.
        after: The position after the draw.
        responses: The engine's responses, if generated ahead.
    """

    number: int
    problems: Problems
    before: int
    after: int
    responses: Resident[Any] | None = None

    @classmethod
    def draw(cls, number: int, stream: Task, count: int) -> _Batch:
        before, drawn = stream.position, stream.draw(count)
        return cls(number, drawn, before, stream.position)


def _refuse_options(workers: ColocatedGroup, **options: Any) -> None:
    """Refuse options that conflict with each other or with the group.

    Raises:
        ConfigError: Names the first wrong option.
    """

    def is_background(role: str) -> bool:
        try:
            workers.pause(role)  # Pausing raises for a role that isn't a background role.
        except ConfigError:
            return False
        workers.resume(role)
        return True

    classes = {name: info.cls for name, info in workers.roles.items()}
    refuse_options("grpo.train", _option_problems(workers.name, classes, is_background, **options))


def _option_problems(
    place: str, classes: Mapping[str, type | None], is_background: Callable[[str], bool], **options: Any
) -> Iterator[tuple[str, str]]:
    rollout, staleness, samples = options["rollout"], options["staleness"], options["samples"]
    yield from option_problems(options, _LIMITS, place, classes, {"actor": GroupActor, "reward": Reward})
    if samples < 2:
        yield "samples", f"must be 2 or more, as answers are compared, not {samples}"
    place_text = f"in the group {place!r}, which has {', '.join(classes)}"
    if options["kl_coefficient"] > 0 and "reference" not in classes:
        yield "kl_coefficient", f"above 0 needs a role 'reference' (`reference: ppo.reference`) {place_text}"
    if options["rollout_sleeps"] and rollout == _ACTOR:
        yield "rollout_sleeps", "is for a role that only generates; `rollout` is the actor"
    if options["check_weights"] > 0 and rollout == _ACTOR:
        yield "check_weights", "is for a role that only generates; `rollout` is the actor"
    if staleness not in (0, 1):
        yield "staleness", f"must be 0 or 1, not {staleness}"
    if rollout not in classes:
        yield "rollout", f"names no role {place_text}{did_you_mean(rollout, classes)}"
        return
    cls = classes[rollout]
    lacks = [name for name in ("generate", "load_weights") if cls is not None and not hasattr(cls, name)]
    if options["check_weights"] and cls is not None and rollout != _ACTOR and not hasattr(cls, "named_weights"):
        yield "check_weights", f"needs a method `named_weights` of {rollout!r}, which gives back what the role has"
    if lacks and rollout != _ACTOR:
        yield "rollout", f"names a role without {' and '.join(lacks)}; `rollout.engine` has both"
    elif staleness:
        words = f"has the role {rollout!r} generate while the actor learns, so it"
        if options["rollout_sleeps"]:
            yield "staleness", f"{words} mustn't sleep (`rollout_sleeps`)"
        elif rollout == _ACTOR:
            yield "staleness", "needs a role with an engine that generates; `rollout` is the actor"
        elif not is_background(rollout):
            yield "staleness", f"{words} needs `background: true` in the config"
