"""The roles of one group, and what is done with them outside a step."""

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
    """An actor that learns, a reward, and roles that start from the actor's weights; all as views of a group."""

    actor: A
    reward: Reward
    scope: Callable[[], AbstractContextManager[Any]]

    @property
    def followers(self) -> Sequence[Critic | Reference]:
        """Return what starts from the actor's weights."""
        raise NotImplementedError

    def align(self) -> None:
        """Start every model of every rank from the actor of the first rank, as it is now."""
        with self.scope():
            weights = self.actor.weights.keep()
            self.actor.load(weights.ref)
            for role in self.followers:
                role.load(weights.ref)

    def evaluate(self, problems: Problems, max_new_tokens: int) -> dict[str, float]:
        """Greedy answers to some problems: `eval_accuracy` (the very string) and `eval_score` (the task's own)."""
        with self.scope():
            rollout = self.actor.generate.keep(problems, max_new_tokens, greedy=True)
            scores = self.reward.score.keep(rollout.ref)
            means = self.reward.summary(rollout.ref, scores.ref)
        return {"eval_accuracy": means["accuracy"], "eval_score": means["reward"]}

    def answers(self, problems: Problems, max_new_tokens: int) -> list[str]:
        """Greedy answers to some problems, as text."""
        return self.actor.generate(problems, max_new_tokens, greedy=True)["answers"]


@attrs.frozen(eq=False)
class Team(Players[Actor]):
    """The four roles of PPO.

    Attributes:
        actor: `ppo.actor`.
        critic: `ppo.critic`.
        reference: `ppo.reference`.
        reward: `ppo.reward`.
        scope: The group's scope: what is kept inside it is freed at its end.
        pipeline: The group's pipeline: calls made inside it are sent at its end, as one message.
    """

    actor: Actor
    critic: Critic
    reference: Reference
    reward: Reward
    scope: Callable[[], AbstractContextManager[Any]]
    pipeline: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def of(cls, group: ColocatedGroup) -> Team:
        """The roles named actor, critic, reference and reward of a group."""
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
        """The critic and the reference."""
        return self.reference, self.critic
