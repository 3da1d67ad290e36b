"""Roles with numbers that aren't finite: scores, and weights."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from colocate import Concat, Scatter, method
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.reward import Reward
from colocate_ppo.rollout import Rollout
from colocate_ppo.task import Problem


class Judged(Reward):
    """Give the second answer a score that a test chooses."""

    score_of_second: ClassVar[Any] = 0.5

    def score_answer(self, answer: str, problem: Problem) -> float:
        score: float = self.score_of_second if problem.question == "second: " else 0.25
        return score


class JoinedCall(Reward):
    """Score a batch at once, its last row by no number."""

    @method(dispatch=Scatter("rollout"), collect=Concat())
    def score(self, rollout: Rollout) -> Tensor:
        scores = torch.ones(len(rollout["answers"]))
        scores[-1] = math.nan
        return scores


class Failing(Reward):
    """Give numbers at first, and then none."""

    calls = 0

    def score_answer(self, answer: str, problem: Problem) -> float:
        self.calls += 1
        return math.nan if self.calls > 60 else float(len(answer) % 3)


class Lengths(Reward):
    """Score an answer by its length."""

    def score_answer(self, answer: str, problem: Problem) -> float:
        return len(answer) / 4


class Spoiled(GroupActor):
    """An actor of which a test can spoil a weight."""

    @method
    def spoil(self) -> None:
        weight: Any = next(self.model.module.parameters()).detach()
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        local.view(-1)[0] = math.nan

    @method
    def numbers(self) -> list[float]:
        """Return the sum of each weight."""
        return [float(each.sum()) for each in self.model.copy_weights().values()]
