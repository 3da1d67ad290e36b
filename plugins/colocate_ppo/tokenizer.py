"""The policy's tokenizer: made in code by default, one token per character, so that nothing is downloaded."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from torch import Tensor

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
_CHARACTERS = "\n" + " " + string.ascii_letters + string.digits + string.punctuation


@attrs.frozen(eq=False)
class Padded:
    """Rows of tokens, padded on one side: `tokens` int64 and `mask`, which is false on padding."""

    tokens: Tensor
    mask: Tensor


@attrs.frozen(eq=False)
class Tokenizer:
    """A tokenizer of transformers, for questions and answers.

    Attributes:
        inner: What transformers made.
        size: How many tokens there are.
        pad: The padding token.
        end: The token that ends an answer.
    """

    inner: Any
    size: int
    pad: int
    end: int

    @classmethod
    def of(cls, inner: Any) -> Tokenizer:
        """From a tokenizer of transformers; one without a padding token pads with its end token."""
        pad = inner.eos_token_id if inner.pad_token_id is None else inner.pad_token_id
        inner.pad_token_id = pad
        return cls(inner, len(inner), pad, inner.eos_token_id)

    def prompts(self, questions: Sequence[str], device: torch.device) -> Padded:
        """Questions, a line each, padded on the left."""
        return self._encode([f"{question}\n" for question in questions], device, side="left", special=True)

    def answers(self, answers: Sequence[str], device: torch.device) -> Padded:
        """Answers with an end token, padded on the right."""
        ended = [f"{answer}{self.inner.eos_token}" for answer in answers]
        return self._encode(ended, device, side="right", special=False)

    def texts(self, responses: Padded) -> list[str]:
        """Responses as text, without end tokens and blanks around."""
        texts: list[str] = self.inner.batch_decode(responses.tokens, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _encode(self, texts: list[str], device: torch.device, side: str, special: bool) -> Padded:
        encoded = self.inner(texts, return_tensors="pt", padding=True, padding_side=side, add_special_tokens=special)
        return Padded(encoded["input_ids"].to(device), encoded["attention_mask"].to(device).bool())


def character_tokenizer(phrases: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer with a token for each printable ASCII character and the newline.

    Args:
        phrases: Texts that are one token each. A beginning that all questions share makes sequences much shorter.
    """
    from transformers import PreTrainedTokenizerFast  # as in the networks, by what makes one

    vocabulary = {token: index for index, token in enumerate([*_SPECIAL.values(), *_CHARACTERS])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token=_SPECIAL["unk_token"]))
    backend.decoder = decoders.Fuse()
    inner: Any = PreTrainedTokenizerFast  # its signature is not typed
    inner = inner(tokenizer_object=backend, **_SPECIAL)
    inner.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return Tokenizer.of(inner)


def pretrained_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a hub id or a local folder."""
    from transformers import AutoTokenizer

    return Tokenizer.of(AutoTokenizer.from_pretrained(name, trust_remote_code=False))
