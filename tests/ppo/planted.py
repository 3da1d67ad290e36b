"""Faults of a run that doesn't learn: each class is a role with one, in the place of the right one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colocate import Concat, OnRank, Scatter, Weights, method
from colocate_ppo.forward import INFERENCE
from colocate_ppo.group_actor import GroupActor
from colocate_ppo.reward import Reward
from colocate_ppo.rollout import Rollout
from colocate_ppo.task import Problem, Problems
from colocate_rollout.contract import Row, Sampling
from colocate_rollout.role import EngineRole


class WrongSign(Reward):
    """The better an answer, the lower its score."""

    def score_answer(self, answer: str, problem: Problem) -> float:
        return -super().score_answer(answer, problem)


class ShuffledLabels(Reward):
    """The scores are those of other answers."""

    @method(dispatch=Scatter("rollout"), collect=Concat())
    def score(self, rollout: Rollout) -> Tensor:
        return super().score(rollout).flip(0)


class PadsLeft(GroupActor):
    """Responses have their padding before them."""

    @method(dispatch=Scatter("problems", "responses"), collect=Concat(), awake=())
    def read(self, problems: Problems, responses: Sequence[Any], max_new_tokens: int) -> Rollout:
        rollout = super().read(problems, responses, max_new_tokens)
        tokens, mask = rollout["tokens"], rollout["mask"]
        width = mask.shape[1]
        for row in range(len(mask)):
            shift = width - int(mask[row].sum())
            tokens[row, -width:] = tokens[row, -width:].roll(shift)
        return rollout


class Dropout(GroupActor):
    """Dropout is left on where log-probabilities are taken."""

    @method(dispatch=Scatter("rollout"), collect=Concat(), awake=INFERENCE)
    @torch.no_grad()
    def log_probs(self, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        def drop(module: object, given: object, embedded: Tensor) -> Tensor:
            return torch.nn.functional.dropout(embedded, 0.1)

        model: Any = self.model.module
        hook = model.get_input_embeddings().register_forward_hook(drop)
        try:
            return super().log_probs(rollout, temperature)
        finally:
            hook.remove()


class NoTemperature(GroupActor):
    """Log-probabilities are of another temperature than what was sampled."""

    @method(dispatch=Scatter("rollout"), collect=Concat(), awake=INFERENCE)
    @torch.no_grad()
    def log_probs(self, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        return super().log_probs(rollout, 1.0)


class NoBaseline(GroupActor):
    """Scores are compared with nothing."""

    @method(dispatch=OnRank(0), awake=())
    def advantages(self, scores: Tensor, samples: int, baseline: Any = "leave_one_out") -> Tensor:
        return scores


class LostRow(GroupActor):
    """The last response of each rank counts for nothing: no token of it is learned from."""

    @method(dispatch=Scatter("problems", "responses"), collect=Concat(), awake=())
    def read(self, problems: Problems, responses: Sequence[Any], max_new_tokens: int) -> Rollout:
        rollout = super().read(problems, responses, max_new_tokens)
        rollout["mask"][-1] = False
        return rollout


class MixedRows(EngineRole):
    """What is sampled for one prompt goes to another one."""

    @method(dispatch=EngineRole.generate.spec.dispatch, awake=("weights", "cache"))  # type: ignore[untyped-decorator]
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int = 1,
        sampling: Sampling | Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[int, tuple[Row, ...]]]:
        for index, rows in super().generate(prompts, samples, sampling):
            yield len(prompts) - 1 - index, rows


class StaleWeights(EngineRole):
    """The weights arrive once, and never again."""

    @method(awake=("weights",))
    def load_weights(self, weights: Weights | Iterable[tuple[str, Any]], version: int) -> None:
        if version == 1:
            super().load_weights(weights, version)
        else:
            for _ in weights:
                pass


class _Changed(EngineRole):
    """Weights arrive, and then something is done to them."""

    def change(self, weights: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    @method(awake=("weights",))
    def load_weights(self, weights: Weights | Iterable[tuple[str, Any]], version: int) -> None:
        super().load_weights(weights, version)
        with torch.no_grad():
            found: Any = self.named_weights()
            self.change(dict(found))


class OneRanksShard(_Changed):
    """On one rank a part of a tensor isn't written."""

    def change(self, weights: Mapping[str, Tensor]) -> None:
        if self.ctx.rank == 1:
            weights["model.layers.0.mlp.up_proj.weight"][:4].zero_()


class Swapped(_Changed):
    """Two tensors of one shape have changed places."""

    def change(self, weights: Mapping[str, Tensor]) -> None:
        one, other = (weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in ("q", "o"))
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
