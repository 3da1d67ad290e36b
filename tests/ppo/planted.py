"""Roles with one fault each, for runs that don't learn."""

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
    """A reward that scores the worse answer higher."""

    def score_answer(self, answer: str, problem: Problem) -> float:
        return -super().score_answer(answer, problem)


class ShuffledLabels(Reward):
    """A reward that gives each answer the score of another one."""

    @method(dispatch=Scatter("rollout"), collect=Concat())
    def score(self, rollout: Rollout) -> Tensor:
        return super().score(rollout).flip(0)


class PadsLeft(GroupActor):
    """An actor that pads responses on the left."""

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
    """An actor that computes log-probabilities with dropout."""

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
    """An actor whose log-probabilities ignore the temperature of the sampling."""

    @method(dispatch=Scatter("rollout"), collect=Concat(), awake=INFERENCE)
    @torch.no_grad()
    def log_probs(self, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        return super().log_probs(rollout, 1.0)


class NoBaseline(GroupActor):
    """An actor whose advantages are the plain scores."""

    @method(dispatch=OnRank(0), awake=())
    def advantages(self, scores: Tensor, samples: int, baseline: Any = "leave_one_out") -> Tensor:
        return scores


class LostRow(GroupActor):
    """An actor that masks all tokens of the last response on each rank."""

    @method(dispatch=Scatter("problems", "responses"), collect=Concat(), awake=())
    def read(self, problems: Problems, responses: Sequence[Any], max_new_tokens: int) -> Rollout:
        rollout = super().read(problems, responses, max_new_tokens)
        rollout["mask"][-1] = False
        return rollout


class MixedRows(EngineRole):
    """An engine that gives each prompt the answers to another one."""

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
    """An engine that loads weights once and ignores later ones."""

    @method(awake=("weights",))
    def load_weights(self, weights: Weights | Iterable[tuple[str, Any]], version: int) -> None:
        if version == 1:
            super().load_weights(weights, version)
        else:
            for _ in weights:
                pass


class _Changed(EngineRole):
    """An engine that changes weights after loading them."""

    def change(self, weights: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    @method(awake=("weights",))
    def load_weights(self, weights: Weights | Iterable[tuple[str, Any]], version: int) -> None:
        super().load_weights(weights, version)
        with torch.no_grad():
            found: Any = self.named_weights()
            self.change(dict(found))


class OneRanksShard(_Changed):
    """An engine that zeroes a part of a tensor on rank 1."""

    def change(self, weights: Mapping[str, Tensor]) -> None:
        if self.ctx.rank == 1:
            weights["model.layers.0.mlp.up_proj.weight"][:4].zero_()


class Swapped(_Changed):
    """An engine that swaps two tensors of the same shape."""

    def change(self, weights: Mapping[str, Tensor]) -> None:
        one, other = (weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in ("q", "o"))
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
