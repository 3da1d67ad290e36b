"""Forward passes over rollouts; each pass computes the outputs for all response tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor

from colocate_ppo.maths import token_log_probs
from colocate_ppo.rollout import Rollout

Model: TypeAlias = Callable[..., Any]

INFERENCE: tuple[Literal["weights"], Literal["cache"]] = ("weights", "cache")
"""The tags of a role's memory that a forward pass needs: neither gradients nor the optimizer's state."""


def response_logits(
    model: Model, tokens: Tensor, attention: Tensor, responses: int, temperature: float = 1.0
) -> Tensor:
    """Return the logits that predict each response token.

    Args:
        model: A causal language model.
        tokens: `[B, P + R]`, int64, padded on both sides.
        attention: `[B, P + R]`, boolean; false on padding.
        responses: R, the number of response positions.
        temperature: Divides the logits, as in sampling.

    Returns:
        `[B, R, V]`, float32. The model's output at the last prompt token predicts the first response token.
    """
    logits: Tensor = model(**_make_inputs(tokens, attention), use_cache=False, logits_to_keep=responses + 1).logits
    return logits[: len(tokens), :-1].float() / temperature


def response_log_probs(model: Model, rollout: Rollout, temperature: float) -> Tensor:
    """Return the log-probability of each response token, `[B, R]`."""
    tokens, responses = rollout["tokens"], rollout["mask"].shape[1]
    logits = response_logits(model, tokens, rollout["attention"], responses, temperature)
    return token_log_probs(logits, tokens[:, -responses:])


def response_values(model: Model, tokens: Tensor, attention: Tensor, responses: int) -> Tensor:
    """Return the value of the state before each response token, `[B, R]`.

    The arguments are the same as for `response_logits`.
    """
    values: Tensor = model(**_make_inputs(tokens, attention))
    return values[: len(tokens), -responses - 1 : -1, 0].float()


def token_positions(attention: Tensor) -> Tensor:
    """Return each token's position in the row, counted without padding, so that left padding changes nothing."""
    return (attention.long().cumsum(dim=-1) - 1).clamp(min=0)


def _make_inputs(tokens: Tensor, attention: Tensor) -> dict[str, Tensor]:
    if not len(tokens):
        # A rank may have no row of a minibatch, but transformers needs a row. The dummy row's output is cut off later.
        tokens, attention = (tensor.new_ones(1, tensor.shape[1]) for tensor in (tokens, attention))
    return {"input_ids": tokens, "attention_mask": attention, "position_ids": token_positions(attention)}
