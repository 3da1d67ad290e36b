"""Roles with scores or weights that aren't finite."""

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
    """A reward that gives the second answer a score of the test's choice."""

    score_of_second: ClassVar[Any] = 0.5

    def score_answer(self, answer: str, problem: Problem) -> float:
        score: float = self.score_of_second if problem.question == "second: " else 0.25
        return score


class WholeBatchReward(Reward):
    """A reward that scores a whole batch at once, and the last row with NaN."""

    @method(dispatch=Scatter("rollout"), collect=Concat())
    def score(self, rollout: Rollout) -> Tensor:
        scores = torch.ones(len(rollout["answers"]))
        scores[-1] = math.nan
        return scores


class Failing(Reward):
    """A reward that scores with NaN after sixty answers."""

    calls = 0

    def score_answer(self, answer: str, problem: Problem) -> float:
        self.calls += 1
        return math.nan if self.calls > 60 else float(len(answer) % 3)


class Lengths(Reward):
    """A reward that scores an answer by its length."""

    def score_answer(self, answer: str, problem: Problem) -> float:
        return len(answer) / 4


class Spoiled(GroupActor):
    """An actor with a method that sets a weight to NaN."""

    @method
    def spoil(self) -> None:
        weight: Any = next(self.model.module.parameters()).detach()
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        local.view(-1)[0] = math.nan

    @method
    def numbers(self) -> list[float]:
        return [float(each.sum()) for each in self.model.copy_weights().values()]
