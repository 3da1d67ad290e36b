"""The job `ppo.train`: a supervised warm-up, then PPO.

Roles exchange residents, so that the driver receives only scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from colocate import RoleSpec, Run, checks, wait
from colocate_ppo.actor import Actor
from colocate_ppo.critic import Critic
from colocate_ppo.maths import KlEstimator
from colocate_ppo.options import AMOUNT, BOUND, SHARE, Limit, refuse_options
from colocate_ppo.recovery import OnStepFailure
from colocate_ppo.reference import Reference
from colocate_ppo.reward import Reward
from colocate_ppo.task import Problems
from colocate_ppo.team import Team
from colocate_ppo.training import Training, find_classes, find_group, option_problems, scale_actor_lr

_ROLES: Mapping[str, type] = {"actor": Actor, "critic": Critic, "reference": Reference, "reward": Reward}
_LIMITS: Mapping[str, Limit] = {
    "gamma": SHARE,
    "lam": SHARE,
    "value_clip": BOUND,
    "entropy_coefficient": AMOUNT,
    "critic_only_steps": AMOUNT,
}


def _check_options(
    options: Mapping[str, Any], groups: Mapping[str, Mapping[str, RoleSpec[Any]]]
) -> Iterable[tuple[str, str]]:
    if len(named := [name for name in groups if options["group"] in (None, name)]) != 1:
        return [("group", f"must name the group to train in; the config has {', '.join(groups) or 'none'}")]
    return option_problems(options, _LIMITS, named[0], find_classes(groups[named[0]]), _ROLES)


@checks(_check_options)
def train(
    run: Run,
    *,
    group: str | None = None,
    task: str = "spell_backward",
    task_options: Mapping[str, Any] | None = None,
    max_new_tokens: int | None = None,
    warm_up_steps: int | None = None,
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
    checkpoint_waits: bool = True,
    on_step_failure: OnStepFailure = "retry",
    step_retries: int = 3,
    same_rows: bool = True,
) -> None:
    """Train an actor with PPO on a task, in a group with this plugin's four roles.

    Args:
        run: The job's run: groups, log, checkpoints.
        group: The group's name; None if the config has only one.
        task: The name of a reasoning-gym dataset, or "module:function" for a function that returns a list of problems:
            mappings with a `question` and an `answer`. A tenth of the problems, by question, is held out for
            evaluation.
        task_options: Options of the dataset, or arguments of the function.
        max_new_tokens: The longest answer; None for two more than the characters of the longest right answer.
        warm_up_steps: Steps of supervised learning before PPO; None for 500, or for 0 if the actor has a `model`, which
            is pretrained.
        warm_up_batch: Demonstrations in each warm-up step.
        warm_up_ramp: Steps until the warm-up's learning rate is reached; afterwards the rate falls linearly to 0.
        flawed: The fraction of demonstrations that are wrong on purpose, so that PPO has something to improve.
        steps: PPO steps.
        batch: Problems in each step.
        minibatch: Answers in each optimizer step.
        epochs: How often each answer is used.
        temperature: The temperature of the sampling.
        gamma: Discount.
        lam: GAE's lambda.
        clip: PPO's clip range: how far a probability ratio may move from 1 with a gain in the objective.
        value_clip: The clip range of values: how far a value may move with a gain in the objective.
        kl_coefficient: The weight of the KL to the reference in the rewards.
        kl_estimator: The estimator of that KL: "k1", "k2" or "k3" (`colocate_ppo.maths.kl_estimate`).
        entropy_coefficient: The weight of an entropy bonus.
        critic_only_steps: PPO steps at the start that train only the critic.
        actor_ramp: PPO steps until the actor's learning rate is reached.
        actor_decay: The last part of all PPO steps in which the actor's learning rate falls linearly to 0.
        shuffle_rewards: A control experiment: permute the scores of a batch, so that nothing can be learned.
        eval_every: PPO steps between evaluations, which are greedy answers to held-out problems; 0 evaluates before the
            first step and after the last one only.
        eval_problems: Problems in an evaluation.
        checkpoint_every: PPO steps between checkpoints; 0 for one at the end only.
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
    workers = find_group(run, group, "ppo.train")
    classes = {name: info.cls for name, info in workers.roles.items()}
    refuse_options("ppo.train", option_problems(options, _LIMITS, workers.name, classes, _ROLES))
    team = Team.from_group(workers)
    actor, critic, reference, reward = team.actor, team.critic, team.reference, team.reward
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
        job="ppo.train",
    )
    part, longest = training.run_part, training.longest

    def step() -> dict[str, float]:
        with team.scope():
            return learn(training.progress.step, training.problems.draw(batch))

    def learn(number: int, asked: Problems) -> dict[str, float]:
        def roll_out() -> tuple[Any, ...]:
            with team.pipeline():
                rollout = actor.generate.keep(asked, longest, temperature, number=number)
                scores = reward.score.keep(rollout.ref)
                summary = reward.summary.submit(rollout.ref, scores.ref)
                if shuffle_rewards:
                    scores = reward.shuffle.keep(scores.ref, number)
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
            # Raise a failure of the rollout here, and not in a later call that uses a failed resident.
            estimates.wait()
            return rollout.ref, log_probs.ref, values.ref, estimates.ref, {**summary.result(), "kl": kl.result()}

        rollout, log_probs, values, estimates, metrics = part("rollout", roll_out)

        def update() -> dict[str, float]:
            lr_scale = scale_actor_lr(number, steps, critic_only_steps, actor_ramp, actor_decay)
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
            wait([of_actor])  # Wait only for the last call, so that this thread wakes up once.
            return {**of_critic.result(), **of_actor.result()}

        results: dict[str, float] = metrics | part("update", update)
        return results

    training.run_training(step)
