"""Rollouts: questions with their answers, as rows of tensors that are handed from role to role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import attrs
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from colocate_ppo.task import Problem


class Rollout(TypedDict):
    """A batch of questions and answers: B rows of P prompt and R response positions.

    The prompts are padded on the left and the responses on the right, so all responses begin at position P.

    Attributes:
        tokens: `[B, P + R]`, int64.
        attention: `[B, P + R]`, boolean; false on padding.
        mask: `[B, R]`, boolean; true on the response's own tokens, the end token included.
        problems: What was asked, a list of B.
        answers: The responses as text, a list of B.
    """

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    problems: list[Problem]
    answers: list[str]


@attrs.frozen(eq=False)
class Padded:
    """Rows of tokens, padded on one side: `tokens` int64 and `mask`, which is false on padding."""

    tokens: Tensor
    mask: Tensor


def encode_prompts(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], device: torch.device) -> Padded:
    """The questions, a line each, padded on the left."""
    return _encode(tokenizer, [f"{problem.question}\n" for problem in problems], device, side="left", special=True)


def encode_answers(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], device: torch.device) -> Padded:
    """The problems' own answers with an end token, padded on the right."""
    texts = [f"{problem.answer}{tokenizer.eos_token}" for problem in problems]
    return _encode(tokenizer, texts, device, side="right", special=False)


def widen(prompts: Padded, width: int, pad: int) -> Padded:
    """The same prompts, padded on the left to a width."""
    missing = width - prompts.tokens.shape[1]
    return Padded(
        functional.pad(prompts.tokens, (missing, 0), value=pad), functional.pad(prompts.mask, (missing, 0), value=False)
    )


def join(prompts: Padded, responses: Padded, problems: list[Problem], answers: list[str]) -> Rollout:
    """A rollout of its parts."""
    return {
        "tokens": torch.cat([prompts.tokens, responses.tokens], dim=1),
        "attention": torch.cat([prompts.mask, responses.mask], dim=1),
        "mask": responses.mask,
        "problems": problems,
        "answers": answers,
    }


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], device: torch.device, side: str, special: bool
) -> Padded:
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side, add_special_tokens=special)
    return Padded(encoded["input_ids"].to(device), encoded["attention_mask"].to(device).bool())
