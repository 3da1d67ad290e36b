"""The policy's tokenizer: made in code by default, one token per character, so that nothing is downloaded."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, Literal

import attrs
import torch
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from torch import Tensor

from colocate import ConfigError

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
        ends: The tokens that end an answer, of which the first ends demonstrations.
        pad: The padding token.
    """

    inner: Any
    size: int
    ends: Sequence[int]
    pad: int

    @classmethod
    def of(cls, inner: Any, ends: Sequence[int] = (), stop: Sequence[str | int] = ()) -> Tokenizer:
        """From a tokenizer of transformers; one without a padding token pads with its end token.

        Args:
            inner: The tokenizer.
            ends: The tokens that end an answer of the model; where there are none, the tokenizer's own end token does.
            stop: More of them, each as its text or its number.

        Raises:
            ConfigError: Nothing ends an answer, or a text of `stop` is no single token.
        """
        own = [] if inner.eos_token_id is None else [inner.eos_token_id]
        ends = [*ends] or own
        ends = [*(each for each in own if each in ends), *ends, *(_token(inner, each) for each in stop)]
        if not ends:
            raise ConfigError("no token ends an answer, by the model or by its tokenizer: name one by `stop`")
        if inner.pad_token_id is None:
            inner.pad_token_id = ends[0]
        return cls(inner, len(inner), [*dict.fromkeys(ends)], inner.pad_token_id)

    def prompts(self, questions: Sequence[str], device: torch.device) -> Padded:
        """Questions, a line each, padded on the left."""
        lines = [f"{question}\n" for question in questions]
        return self._padded(self.inner(lines)["input_ids"], device, side="left")

    def answers(self, answers: Sequence[str], device: torch.device) -> Padded:
        """Answers with an end token, padded on the right."""
        rows = self.inner([*answers], add_special_tokens=False)["input_ids"]
        return self._padded([[*row, self.ends[0]] for row in rows], device, side="right")

    def texts(self, responses: Padded) -> list[str]:
        """Responses as text, without end tokens and blanks around."""
        texts: list[str] = self.inner.batch_decode(responses.tokens, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _padded(self, rows: Sequence[Sequence[int]], device: torch.device, side: Literal["left", "right"]) -> Padded:
        tokens = torch.full((len(rows), max(map(len, rows), default=0)), self.pad)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for number, row in enumerate(rows):
            place = slice(tokens.shape[1] - len(row), None) if side == "left" else slice(len(row))
            tokens[number, place], mask[number, place] = torch.tensor(row, dtype=torch.int64), True
        return Padded(tokens.to(device), mask.to(device))


def character_tokenizer(phrases: Sequence[str] = (), stop: Sequence[str | int] = ()) -> Tokenizer:
    """A tokenizer with a token for each printable ASCII character and the newline.

    Args:
        phrases: Texts that are one token each. A beginning that all questions share makes sequences much shorter.
        stop: Tokens that end an answer besides the end token.
    """
    from transformers import PreTrainedTokenizerFast  # as in the networks, by what makes one

    vocabulary = {token: index for index, token in enumerate([*_SPECIAL.values(), *_CHARACTERS])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token=_SPECIAL["unk_token"]))
    backend.decoder = decoders.Fuse()
    inner: Any = PreTrainedTokenizerFast  # its signature is not typed
    inner = inner(tokenizer_object=backend, **_SPECIAL)
    inner.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return Tokenizer.of(inner, stop=stop)


def pretrained_tokenizer(name: str, ends: Sequence[int] = (), stop: Sequence[str | int] = ()) -> Tokenizer:
    """The tokenizer of a hub id or a local folder; `ends` and `stop` as of `Tokenizer.of`."""
    from transformers import AutoTokenizer

    return Tokenizer.of(AutoTokenizer.from_pretrained(name, trust_remote_code=False), ends, stop)


def _token(inner: Any, stop: str | int) -> int:
    """Return the token that a text or a number names."""
    if isinstance(stop, str):
        tokens: list[int] = inner(stop, add_special_tokens=False)["input_ids"]
    else:
        tokens = [stop] if 0 <= stop < len(inner) else []
    if len(tokens) != 1 or (tokens[0] == inner.unk_token_id and stop not in (inner.unk_token, inner.unk_token_id)):
        raise ConfigError(f"stop={stop!r} is no single token of the model's tokenizer, and one token ends an answer")
    return tokens[0]
