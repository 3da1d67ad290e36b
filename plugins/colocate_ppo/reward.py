"""`ppo.reward`: the task's own scorer, or that of a subclass."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from colocate import Concat, OnRank, Reduce, Role, Scatter, method
from colocate.signatures import brief
from colocate_ppo.parallel import drawing
from colocate_ppo.rollout import Rollout
from colocate_ppo.task import Problem


class Reward(Role):
    """Scores answers with the scorer that reasoning-gym has for their problem.

    A subclass with a `score_answer` of its own scores as that says. One that needs more than texts has a `score` of its
    own: `rollout["token_ids"]` has the tokens of each answer. A score that is no finite number is an error: one of them
    would be in each weight after the next update.
    """

    def score_answer(self, answer: str, problem: Problem) -> float:
        """The score of one answer; higher is better.

        Args:
            answer: Its text with special tokens and blanks, without the token that ended it. reasoning-gym's scorers
                get it without the blanks around it, as they compare it with answers that have none.
            problem: What was asked.
        """
        score: float = _scorer(problem.entry["metadata"]["source_dataset"])(answer.strip(), problem.entry)
        return score

    @method(dispatch=Scatter("rollout"), collect=Concat())
    def score(self, rollout: Rollout) -> Tensor:
        """The score of each answer, `[B]` float32; those of reasoning-gym are 0 to 1."""
        scores = []
        for row, (answer, problem) in enumerate(zip(rollout["answers"], rollout["problems"], strict=True)):
            score = self.score_answer(answer, problem)
            if not _is_finite(score):
                raise self._bad_score(score, row, rollout)
            scores.append(score)
        return torch.tensor(scores, dtype=torch.float32, device=self.ctx.device)

    @method(dispatch=OnRank(0))
    def shuffle(self, scores: Tensor, number: int | None = None) -> Tensor:
        """The scores of the whole batch in random order: a control, with which nothing can be learned.

        Args:
            scores: `[B]`.
            number: Which random numbers to draw, as of the actor's `generate`.
        """
        order = torch.randperm(len(scores), generator=drawing(self.ctx, number), device=scores.device)
        return scores[order]

    @method(dispatch=Scatter("rollout", "scores"), collect=Reduce("mean"))
    def summary(self, rollout: Rollout, scores: Tensor) -> dict[str, float]:
        """Means over the answers: `reward` (their scores), `accuracy` and `length` in tokens.

        An answer is accurate if it is the right one to the letter, but for blanks around it.

        Raises:
            ValueError: A score is no finite number, as of a subclass with a `score` of its own.
        """
        if len(bad := (~scores.isfinite()).nonzero()):
            row = int(bad[0, 0])
            raise self._bad_score(scores[row].item(), row, rollout)
        right = [*map(operator.eq, rollout["problems"].answers, map(str.strip, rollout["answers"]))]
        return {
            "reward": scores.mean().item(),
            "accuracy": sum(right) / len(right),
            "length": rollout["mask"].sum(dim=1).float().mean().item(),
        }

    def _bad_score(self, score: object, row: int, rollout: Rollout) -> ValueError:
        answer, question = rollout["answers"][row], rollout["problems"].questions[row]
        return ValueError(
            f"role {self.ctx.role!r} gives row {row} the score {brief(repr(score))}, which is no finite number: the "
            f"answer {brief(repr(answer))} to {brief(repr(question))}. Give each answer a number, also one that can't "
            "be judged (0, say), or raise an error"
        )


def _is_finite(score: Any) -> bool:
    """Return whether a score is a number that float32 has."""
    try:
        return bool(abs(score) <= torch.finfo(torch.float32).max)
    except (TypeError, ValueError, RuntimeError):
        return False


@cache
def _scorer(task: str) -> Any:
    import reasoning_gym  # it takes a second: who only imports this class does without

    return reasoning_gym.get_score_answer_fn(task)
