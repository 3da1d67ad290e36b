"""`ppo.train`: a supervised warm-up, then PPO. Between roles everything goes by resident; the driver sees scalars."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from colocate import ColocatedGroup, ConfigError, RoleError, Run, wait
from colocate_ppo.maths import KlEstimator
from colocate_ppo.recovery import OnStepFailure, Recovery
from colocate_ppo.task import Problems, Task
from colocate_ppo.team import Team

_SHOWN = 8
_PROGRESS = "progress.json"
_ANSWERS = "answers to held-out problems"


@attrs.define
class Progress:
    """How far the job is: what a checkpoint has besides the roles' own files.

    Attributes:
        warmed: Warm-up steps done.
        step: PPO steps done.
        position: Where the task's training stream goes on.
        before: Answers to the shown problems between warm-up and PPO.
    """

    warmed: int = 0
    step: int = 0
    position: int = 0
    before: list[str] = attrs.field(factory=list)

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        path.write_text(json.dumps(attrs.asdict(self)), encoding="utf-8")

    def read(self, path: Path) -> None:
        """Be as far as the file says."""
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            setattr(self, name, value)


def train(
    run: Run,
    *,
    group: str | None = None,
    task: str = "spell_backward",
    task_options: Mapping[str, Any] | None = None,
    max_new_tokens: int | None = None,
    warm_up_steps: int = 500,
    warm_up_batch: int = 64,
    warm_up_ramp: int = 20,
    flawed: float = 0.7,
    steps: int = 100,
    batch: int = 256,
    minibatch: int = 64,
    epochs: int = 1,
    temperature: float = 1.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    clip: float = 0.2,
    value_clip: float = 0.5,
    kl_coefficient: float = 0.01,
    kl_estimator: KlEstimator = "k1",
    entropy_coefficient: float = 0.0,
    critic_only_steps: int = 5,
    actor_ramp: int = 10,
    actor_decay: float = 0.5,
    shuffle_rewards: bool = False,
    eval_every: int = 10,
    eval_problems: int = 256,
    checkpoint_every: int = 20,
    on_step_failure: OnStepFailure = "retry",
    step_retries: int = 3,
) -> None:
    """Train an actor with PPO on a task of reasoning-gym, in a group with this plugin's four roles.

    Args:
        run: What the job is given: groups, log, checkpoints.
        group: The group's name; None where the config has only one.
        task: The name of a reasoning-gym dataset.
        task_options: Its options.
        max_new_tokens: The longest answer; None for two more than the longest right one has characters.
        warm_up_steps: Steps of supervised learning before PPO.
        warm_up_batch: Demonstrations in each of them.
        warm_up_ramp: Steps until the warm-up's learning rate is reached; from there it falls linearly to 0.
        flawed: The fraction of demonstrations that are wrong on purpose, so that PPO has something to find.
        steps: PPO steps.
        batch: Problems in each of them.
        minibatch: Answers in each step of the optimizers.
        epochs: How often each answer is used.
        temperature: Of the sampling.
        gamma: Discount.
        lam: GAE's lambda.
        clip: How far a probability ratio may go from 1 to any gain.
        value_clip: How far a value may move to any gain.
        kl_coefficient: The weight of the KL to the reference in the rewards.
        kl_estimator: The estimator of that KL.
        entropy_coefficient: The weight of an entropy bonus.
        critic_only_steps: PPO steps at the start that leave the actor as it is.
        actor_ramp: PPO steps until the actor's learning rate is reached.
        actor_decay: The part of all PPO steps, at their end, in which the actor's learning rate falls linearly to 0.
        shuffle_rewards: A control: the scores of a batch change places, so that nothing can be learned from them.
        eval_every: PPO steps between evaluations, which are greedy answers to held-out problems; 0 for those before the
            first step and after the last one only.
        eval_problems: Problems in an evaluation.
        checkpoint_every: PPO steps between checkpoints; 0 for one at the end only.
        on_step_failure: What becomes of a step in which a role has raised. "retry": the part that failed is done again,
            with the same rows and random numbers; updates that were made aren't made twice. "restore": the job goes
            back to its last checkpoint. "fail": it ends. When ranks are left with different weights, so that the group
            can't go on, it goes back to the checkpoint if the group has `on_failure: restart`.
        step_retries: How often the same part is done again, or the same checkpoint is gone back to.
    """
    workers = _group(run, group)
    team = Team.of(workers)
    actor, critic, reference, reward = team.actor, team.critic, team.reference, team.reward
    problems = Task(task, task_options or {}, seed=run.runtime.seed)
    held_out = problems.held_out(eval_problems)
    shown = held_out[:_SHOWN]
    longest = max_new_tokens or max(map(len, held_out.answers)) + 2
    progress, recovery = Progress(), Recovery(on_step_failure, step_retries)
    part = functools.partial(recovery.part, run)

    def go_on() -> None:
        assert run.resumed is not None
        progress.read(run.resumed / _PROGRESS)
        problems.position = progress.position

    def restore() -> None:
        assert run.resumed is not None
        folder = run.resumed / workers.name
        part("restore", lambda: workers.restore(folder))
        go_on()

    def write() -> None:
        with run.checkpoint(progress.step) as directory:
            workers.checkpoint(directory / workers.name, tag=progress.step)
            progress.write(directory / _PROGRESS)

    def checkpoint() -> None:
        progress.position = problems.position
        part("checkpoint", write)
        recovery.progressed()

    def warm_up() -> None:
        lr_scale = _warm_up_scale(progress.warmed, warm_up_ramp, warm_up_steps)
        shown = problems.demonstrate(warm_up_batch, flawed)
        part("warm_up", lambda: actor.warm_up(shown, lr_scale, number=progress.warmed))
        progress.warmed += 1

    def evaluate() -> dict[str, float]:
        return part("evaluate", lambda: team.evaluate(held_out, longest))

    def step() -> dict[str, float]:
        progress.step += 1
        number, asked = progress.step, problems.draw(batch)

        def roll_out() -> tuple[Any, ...]:
            with team.pipeline():
                rollout = actor.generate.keep(asked, longest, temperature, number=number)
                scores = reward.score.keep(rollout.ref)
                if shuffle_rewards:
                    scores = reward.shuffle.keep(scores.ref, number)
                summary = reward.summary.submit(rollout.ref, scores.ref)
                log_probs = actor.log_probs.keep(rollout.ref, temperature)
                reference_log_probs = reference.log_probs.keep(rollout.ref, temperature)
                kl = reference.kl.submit(rollout.ref, log_probs.ref, reference_log_probs.ref, kl_estimator)
                values = critic.values.keep(rollout.ref)
                estimates = critic.advantages.keep(
                    rollout.ref,
                    scores.ref,
                    values.ref,
                    log_probs.ref,
                    reference_log_probs.ref,
                    gamma=gamma,
                    lam=lam,
                    kl_coefficient=kl_coefficient,
                    kl_estimator=kl_estimator,
                )
            estimates.wait()  # the last of them; and its failure would otherwise be found by who uses it
            return rollout.ref, log_probs.ref, values.ref, estimates.ref, {**summary.result(), "kl": kl.result()}

        rollout, log_probs, values, estimates, metrics = part("rollout", roll_out)

        def update() -> dict[str, float]:
            lr_scale = _actor_scale(number, steps, critic_only_steps, actor_ramp, actor_decay)
            with team.pipeline():
                of_critic = critic.update.submit(
                    rollout, values, estimates, minibatch, epochs, value_clip, number=number
                )
                of_actor = actor.update.submit(
                    rollout,
                    log_probs,
                    estimates,
                    minibatch,
                    epochs,
                    clip,
                    entropy_coefficient,
                    temperature,
                    lr_scale=lr_scale,
                    number=number,
                )
            wait([of_actor])  # the last of them, so that this thread wakes up once
            return {**of_critic.result(), **of_actor.result()}

        given: dict[str, float] = metrics | part("update", update)
        return given

    def steps_to_do() -> None:
        while progress.warmed < warm_up_steps and not run.stopping:
            warm_up()
        if not progress.before and not run.stopping:
            part("align", team.align)
            progress.before = part("evaluate", lambda: team.answers(shown, longest))
            run.log(0, **evaluate())
        while progress.step < steps and not run.stopping:
            with team.scope():
                metrics = step()
            if progress.step == steps or _is_due(progress.step, eval_every):
                metrics |= evaluate()
            run.log(progress.step, **metrics, **recovery.told())
            if progress.step < steps and _is_due(progress.step, checkpoint_every):
                checkpoint()

    run.total(steps)
    if run.resumed is None:
        part("align", team.align)
    elif workers.wait_ready() is None:  # who runs this job hasn't restored it, or finds nothing of it there
        restore()
    else:
        go_on()
    while True:
        try:
            steps_to_do()
            break
        except RoleError as error:
            recovery.restore(run, error, restore)
    checkpoint()
    if progress.before:
        run.show(_ANSWERS, _compare(shown, progress.before, part("evaluate", lambda: team.answers(shown, longest))))


def _group(run: Run, name: str | None) -> ColocatedGroup:
    named = [group for key, group in run.groups.items() if name in (None, key)]
    if len(named) != 1:
        there_are = ", ".join(run.groups) or "none"
        raise ConfigError(f"ppo.train: option `group` must name the group to train in; the config has {there_are}")
    return named[0]


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _compare(problems: Problems, before: Sequence[str], after: Sequence[str]) -> list[dict[str, str]]:
    """Answers before and after, a row for each problem."""
    columns = zip(problems, before, after, strict=True)
    return [{"question": p.question, "right": p.answer, "before": b, "after": a} for p, b, a in columns]


def _warm_up_scale(done: int, ramp: int, steps: int) -> float:
    """Up to 1 in `ramp` steps, then linearly down to 0."""
    return min((done + 1) / max(1, ramp), (steps - done) / max(1, steps - ramp))


def _actor_scale(step: int, steps: int, critic_only: int, ramp: int, decay: float) -> float:
    """0 while only the critic learns; up to 1 in `ramp` steps; linearly to 0 in the last part, of size `decay`."""
    if step <= critic_only:
        return 0.0
    return min(1.0, step / max(1, ramp), (steps - step + 1) / max(1.0, decay * steps))
