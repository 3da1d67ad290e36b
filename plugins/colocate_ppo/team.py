"""The roles of one group, and operations outside a step."""

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
    """Views of a group: an actor that learns, a reward, and roles that start from the actor's weights."""

    actor: A
    reward: Reward
    scope: Callable[[], AbstractContextManager[Any]]

    @property
    def followers(self) -> Sequence[Critic | Reference]:
        """The roles that start from the actor's weights."""
        raise NotImplementedError

    def align(self) -> None:
        """Copy the actor's weights on the first rank to every model on every rank."""
        with self.scope():
            weights = self.actor.weights.keep()
            self.actor.load(weights.ref)
            for role in self.followers:
                role.load(weights.ref)

    def evaluate(self, problems: Problems, max_new_tokens: int) -> dict[str, float]:
        """Answer problems greedily: `eval_accuracy` (exact match) and `eval_score` (the task's own score)."""
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
    """The four roles of PPO.

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
    def of(cls, group: ColocatedGroup) -> Team:
        """Return the views named actor, critic, reference and reward of a group."""
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
        """The reference and the critic."""
        return self.reference, self.critic
