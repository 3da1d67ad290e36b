"""The policy's tokenizer. The default tokenizer has one token per character and needs no download."""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import attrs
import torch
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models
from torch import Tensor

from colocate import ConfigError
from colocate_ppo.task import Question

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
_CHARACTERS = "\n" + " " + string.ascii_letters + string.digits + string.punctuation


@attrs.frozen(eq=False)
class PaddedRows:
    """Rows of tokens padded to the same length: `tokens` (int64) and `mask`, which is false on padding."""

    tokens: Tensor
    mask: Tensor

    @property
    def unpadded_rows(self) -> list[list[int]]:
        """The tokens of each row, without padding."""
        pairs = zip(self.tokens.tolist(), self.mask.tolist(), strict=True)
        return [[*itertools.compress(tokens, mask)] for tokens, mask in pairs]


@attrs.frozen(eq=False)
class Tokenizer:
    """A tokenizer of transformers, adapted to questions and answers.

    Attributes:
        inner: The tokenizer of transformers.
        size: The number of tokens.
        ends: The tokens that end an answer; the first one ends demonstrations.
        pad: The padding token.
        begin: The tokens before a text. A tokenizer's tokens after a text aren't used, because they'd end a question.
        suffix: The text after each question that is a text.
        template_options: Options of the chat template.
    """

    inner: Any
    size: int
    ends: Sequence[int]
    pad: int
    begin: Sequence[int] = ()
    suffix: str = ""
    template_options: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def from_transformers(cls, inner: Any, ends: Sequence[int] = (), stop: Sequence[str | int] = ()) -> Tokenizer:
        """Wrap a tokenizer of transformers; without a padding token, the end token is used for padding.

        Args:
            inner: The tokenizer.
            ends: The tokens that end an answer of the model; if empty, the tokenizer's own end token.
            stop: Further end tokens, each as text or number.

        Raises:
            ConfigError: Nothing ends an answer, or a text of `stop` is no single token.
        """
        default_ends = [] if inner.eos_token_id is None else [inner.eos_token_id]
        ends = [*ends] or default_ends
        ends = [
            *(token for token in default_ends if token in ends),
            *ends,
            *(_find_token(inner, token) for token in stop),
        ]
        if not ends:
            raise ConfigError("no token ends an answer, by the model or by its tokenizer: name one by `stop`")
        if inner.pad_token_id is None:
            inner.pad_token_id = ends[0]
        return cls(inner, len(inner), [*dict.fromkeys(ends)], inner.pad_token_id, _start_tokens(inner))

    def make_prompt(self, question: Question) -> list[int]:
        """Return the token ids of a question's prompt. Messages are converted by the chat template.

        Raises:
            ConfigError: The prompt has no tokens, or tokens unknown to the tokenizer; or the chat template refuses the
                messages.
        """
        if isinstance(question, str):
            tokens = self._encode_text(f"{question}{self.suffix}")
        elif question and isinstance(question[0], Mapping):
            tokens = self._encode_chat(question)
        else:
            tokens = [*cast(Sequence[int], question)]
        if not tokens:
            raise ConfigError(f"the question {question!r} has no tokens, and a model goes on from one at least")
        if unknown := [token for token in tokens if not 0 <= token < self.size]:
            raise ConfigError(f"a question has the token {unknown[0]}, and the tokenizer has {self.size} tokens")
        return tokens

    def _encode_text(self, text: str) -> list[int]:
        """Return a text's tokens, and prepend the begin tokens if missing."""
        tokens: list[int] = self.inner(text, add_special_tokens=False)["input_ids"]
        begins = tokens[: len(self.begin)] == [*self.begin]
        return tokens if begins else [*self.begin, *tokens]

    def _encode_chat(self, messages: Any) -> list[int]:
        messages = [*messages]
        # If the last message is the assistant's, the answer continues that message.
        continued = messages[-1].get("role") == "assistant"
        part = "continue_final_message" if continued else "add_generation_prompt"
        options = {part: True, **self.template_options, "tokenize": True, "return_dict": True}
        try:
            tokens: list[int] = self.inner.apply_chat_template(messages, **options)["input_ids"]
        except Exception as error:  # A chat template is code and may raise any error.
            raise ConfigError(
                f"the chat template of the model's tokenizer can't ask {messages!r}: {str(error).partition(chr(10))[0]}"
            ) from error
        return tokens

    def encode_prompts(self, questions: Sequence[Question], device: torch.device) -> PaddedRows:
        """Return the token ids of each question's prompt, padded on the left."""
        return self.pad_rows([self.make_prompt(question) for question in questions], device, side="left")

    def encode_answers(self, answers: Sequence[str], device: torch.device) -> PaddedRows:
        """Return the tokens of each answer and an end token, padded on the right."""
        rows = self.inner([*answers], add_special_tokens=False)["input_ids"]
        return self.pad_rows([[*row, self.ends[0]] for row in rows], device, side="right")

    def decode_responses(self, responses: PaddedRows) -> list[str]:
        """Decode responses to texts with special tokens and blanks, but without the end token."""
        bodies = [row[:-1] if row and row[-1] in self.ends else row for row in responses.unpadded_rows]
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        # Decode each text with a letter in front, because SentencePiece decoders drop a text's leading blank.
        letter: list[int] = self.inner("a", add_special_tokens=False)["input_ids"]
        if self.inner.decode(letter, **options) != "a":
            return [self.inner.decode(body, **options) for body in bodies]
        return [self.inner.decode([*letter, *body], **options)[1:] for body in bodies]

    def pad_rows(
        self, rows: Sequence[Sequence[int]], device: torch.device, side: Literal["left", "right"]
    ) -> PaddedRows:
        """Pad rows of tokens on one side to the length of the longest row."""
        tokens = torch.full((len(rows), max(map(len, rows), default=0)), self.pad)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for number, row in enumerate(rows):
            place = slice(tokens.shape[1] - len(row), None) if side == "left" else slice(len(row))
            tokens[number, place], mask[number, place] = torch.tensor(row, dtype=torch.int64), True
        return PaddedRows(tokens.to(device), mask.to(device))


def make_character_tokenizer(phrases: Sequence[str] = (), stop: Sequence[str | int] = ()) -> Tokenizer:
    """Build a tokenizer with a token for each printable ASCII character and the newline.

    Args:
        phrases: Texts that are one token each. A token for the common beginning of all questions shortens sequences.
        stop: Further tokens that end an answer.
    """
    # Imported only when needed, because the import is slow.
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*_SPECIAL.values(), *_CHARACTERS])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token=_SPECIAL["unk_token"]))
    backend.decoder = decoders.Fuse()
    inner: Any = PreTrainedTokenizerFast  # Typed Any, because the constructor's signature has no types.
    inner = inner(tokenizer_object=backend, **_SPECIAL)
    inner.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    # The newline after each question lets the model learn where a question ends.
    return attrs.evolve(Tokenizer.from_transformers(inner, stop=stop), suffix="\n")


def load_tokenizer(
    name: str,
    ends: Sequence[int] = (),
    stop: Sequence[str | int] = (),
    template_options: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Load a tokenizer from the hub or from a local folder.

    `Tokenizer.from_transformers` explains `ends` and `stop`.
    """
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_transformers(AutoTokenizer.from_pretrained(name, trust_remote_code=False), ends, stop)
    return attrs.evolve(tokenizer, template_options=template_options or {})


def _start_tokens(inner: Any) -> list[int]:
    letter: list[int] = inner("a", add_special_tokens=False)["input_ids"]
    tokens: list[int] = inner("a")["input_ids"]
    places = (at for at in range(len(tokens)) if tokens[at : at + len(letter)] == letter)
    return tokens[: next(places, 0)]


def _find_token(inner: Any, stop: str | int) -> int:
    if isinstance(stop, str):
        tokens: list[int] = inner(stop, add_special_tokens=False)["input_ids"]
    else:
        tokens = [stop] if 0 <= stop < len(inner) else []
    if len(tokens) != 1 or (tokens[0] == inner.unk_token_id and stop not in (inner.unk_token, inner.unk_token_id)):
        raise ConfigError(f"stop={stop!r} is no single token of the model's tokenizer, and one token ends an answer")
    return tokens[0]
