"""The policy's tokenizer: made in code by default, one token per character, so that nothing is downloaded."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
_CHARACTERS = "\n" + " " + string.ascii_letters + string.digits + string.punctuation


def character_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """A tokenizer with a token for each printable ASCII character and the newline.

    Args:
        phrases: Texts that are one token each. A prefix that all questions share makes sequences much shorter.
    """
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL.values(), *_CHARACTERS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_SPECIAL["unk_token"]))
    backend.decoder = decoders.Fuse()
    make: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, padding_side="left", **_SPECIAL)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


def pretrained_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id or a local folder, ready for batches of prompts."""
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
