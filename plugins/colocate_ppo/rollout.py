"""Rollouts: batches of questions and answers that roles exchange, with tensors of the tokens."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from colocate_ppo.task import Problems
from colocate_ppo.tokenizer import PaddedRows


class Rollout(TypedDict):
    """A batch of questions and answers with B rows, each of P prompt positions and R response positions.

    The prompts are padded on the left and the responses on the right, so all responses begin at position P.

    Attributes:
        tokens: `[B, P + R]`, int64.
        attention: `[B, P + R]`, boolean; false on padding.
        mask: `[B, R]`, boolean; true on the response's own tokens, the end token included.
        problems: The B problems, with the token ids of each prompt.
        answers: The responses as text, a list of B: special tokens and blanks as generated, without the token that
            ended the response.
        token_ids: The token ids of each response, the end token included.
        sampled: `[B, R]`, the log-probabilities of the tokens under the engine that sampled them, if an engine did.
    """

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    problems: Problems
    answers: list[str]
    token_ids: list[list[int]]
    sampled: NotRequired[Tensor]


class Estimates(TypedDict):
    """The training targets of actor and critic: whitened `advantages` and `returns`, `[B, R]` each."""

    advantages: Tensor
    returns: Tensor


def widen_prompts(prompts: PaddedRows, width: int, pad: int) -> PaddedRows:
    """Pad prompts on the left to `width` tokens."""
    missing = width - prompts.tokens.shape[1]
    return PaddedRows(
        functional.pad(prompts.tokens, (missing, 0), value=pad), functional.pad(prompts.mask, (missing, 0), value=False)
    )


def make_rollout(prompts: PaddedRows, responses: PaddedRows, problems: Problems, answers: list[str]) -> Rollout:
    """Combine prompts, responses, problems and answers into a rollout."""
    return {
        "tokens": torch.cat([prompts.tokens, responses.tokens], dim=1),
        "attention": torch.cat([prompts.mask, responses.mask], dim=1),
        "mask": responses.mask,
        "problems": problems,
        "answers": answers,
        "token_ids": responses.unpadded_rows,
    }
