"""The roles of a group, with the operations outside of training steps (copying weights, evaluation)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import attrs

from colocate import ColocatedGroup
from colocate_ppo.actor import Actor
from colocate_ppo.critic import Critic
from colocate_ppo.reference import Reference
from colocate_ppo.reward import Reward
from colocate_ppo.task import Problems

A = TypeVar("A", bound=Actor)


class Players(Generic[A]):
    """The views of a group's roles: an actor that learns, a reward, and roles that start from the actor's weights."""

    actor: A
    reward: Reward
    scope: Callable[[], AbstractContextManager[Any]]

    @property
    def followers(self) -> Sequence[Critic | Reference]:
        """The roles that start from the actor's weights."""
        raise NotImplementedError

    def align_models(self) -> None:
        """Copy the actor's weights from the first rank to all ranks of the actor and the followers."""
        with self.scope():
            weights = self.actor.weights.keep()
            self.actor.load(weights.ref)
            for role in self.followers:
                role.load(weights.ref)

    def evaluate(self, problems: Problems, max_new_tokens: int) -> dict[str, float]:
        """Answer problems greedily; return `eval_accuracy` (exact match) and `eval_score` (the task's own score)."""
        with self.scope():
            rollout = self.actor.generate.keep(problems, max_new_tokens, greedy=True)
            scores = self.reward.score.keep(rollout.ref)
            means = self.reward.summary(rollout.ref, scores.ref)
        return {"eval_accuracy": means["accuracy"], "eval_score": means["reward"]}

    def answers(self, problems: Problems, max_new_tokens: int) -> list[str]:
        """Answer problems greedily; return the answers as text."""
        return self.actor.generate(problems, max_new_tokens, greedy=True)["answers"]


@attrs.frozen(eq=False)
class Team(Players[Actor]):
    """The views of PPO's four roles.

    Attributes:
        actor: `ppo.actor`.
        critic: `ppo.critic`.
        reference: `ppo.reference`.
        reward: `ppo.reward`.
        scope: The group's scope, whose end frees all residents kept inside.
        pipeline: The group's pipeline, whose end sends the calls made inside as one message.
    """

    actor: Actor
    critic: Critic
    reference: Reference
    reward: Reward
    scope: Callable[[], AbstractContextManager[Any]]
    pipeline: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def from_group(cls, group: ColocatedGroup) -> Team:
        """Build a team from a group's roles named actor, critic, reference and reward."""
        return cls(
            group.role("actor", Actor),
            group.role("critic", Critic),
            group.role("reference", Reference),
            group.role("reward", Reward),
            group.scope,
            group.pipeline,
        )

    @property
    def followers(self) -> Sequence[Critic | Reference]:
        """The roles that start from the actor's weights: reference and critic."""
        return self.reference, self.critic
