"""The role `ppo.reward`, which scores answers with the task's or a subclass's scorer."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from colocate import Concat, OnRank, Reduce, Role, Scatter, method
from colocate.signatures import brief
from colocate_ppo.parallel import step_generator
from colocate_ppo.rollout import Rollout
from colocate_ppo.task import Problem


class Reward(Role):
    """A role that scores answers with reasoning-gym's scorer for each problem.

    Override `score_answer` in a subclass to score texts. Override `score` to score with more than texts; for example,
    `rollout["token_ids"]` has the tokens of each answer. A score that isn't finite is an error, because it would spoil
    all weights in the next update.
    """

    def score_answer(self, answer: str, problem: Problem) -> float:
        """Return the score of one answer; a higher score is better.

        Args:
            answer: The answer's text with special tokens and blanks, without the token that ended it. reasoning-gym's
                scorers get the text without surrounding blanks, as they compare it with answers that have none.
            problem: The problem.
        """
        score: float = _load_scorer(problem.entry["metadata"]["source_dataset"])(answer.strip(), problem.entry)
        return score

    @method(dispatch=Scatter("rollout"), collect=Concat())
    def score(self, rollout: Rollout) -> Tensor:
        """Score each answer, `[B]` float32. reasoning-gym's scores are between 0 and 1."""
        scores = []
        for row, (answer, problem) in enumerate(zip(rollout["answers"], rollout["problems"], strict=True)):
            score = self.score_answer(answer, problem)
            if not _is_finite(score):
                raise self._bad_score(score, row, rollout)
            scores.append(score)
        return torch.tensor(scores, dtype=torch.float32, device=self.ctx.device)

    @method(dispatch=OnRank(0))
    def shuffle(self, scores: Tensor, number: int | None = None) -> Tensor:
        """Shuffle the scores of the whole batch, for a control experiment in which nothing can be learned.

        Args:
            scores: `[B]`.
            number: The step's number, which selects the random numbers, as for the actor's `generate`.
        """
        order = torch.randperm(len(scores), generator=step_generator(self.ctx, number), device=scores.device)
        return scores[order]

    @method(dispatch=Scatter("rollout", "scores"), collect=Reduce("mean"))
    def summary(self, rollout: Rollout, scores: Tensor) -> dict[str, float]:
        """Compute means over the answers: `reward` (the scores), `accuracy` and `length` in tokens.

        An accurate answer equals the right one to the letter, except for surrounding blanks.

        Raises:
            ValueError: A score isn't finite, perhaps from a subclass's own `score`.
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
    try:
        return bool(abs(score) <= torch.finfo(torch.float32).max)
    except (TypeError, ValueError, RuntimeError):
        return False


@cache
def _load_scorer(task: str) -> Any:
    import reasoning_gym  # Imported only when needed, because the import takes a second.

    return reasoning_gym.get_score_answer_fn(task)
