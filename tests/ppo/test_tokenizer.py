"""The character tokenizer."""

from __future__ import annotations

import string

import torch
from hypothesis import given, strategies as st

from colocate_ppo.tokenizer import make_character_tokenizer

PHRASE = "Spell this word backward (example: sun -> nus): "
TOKENIZER = make_character_tokenizer([PHRASE])
INNER = TOKENIZER.inner
CHARACTERS = "\n " + string.ascii_letters + string.digits + string.punctuation


@given(st.text(alphabet=CHARACTERS))
def test_every_text_comes_back(text: str) -> None:
    plain = make_character_tokenizer().inner
    tokens = plain(text)["input_ids"]
    assert len(tokens) == len(text)
    assert plain.decode(tokens) == text


@given(st.text(alphabet=string.ascii_letters, max_size=5))
def test_a_phrase_is_one_token(word: str) -> None:
    tokens = INNER(f"{PHRASE}{word}\n")["input_ids"]
    assert len(tokens) == 1 + len(word) + 1
    assert INNER.decode(tokens) == f"{PHRASE}{word}\n"


def test_unknown_characters_are_marked() -> None:
    assert INNER("ä")["input_ids"] == [INNER.unk_token_id]


def test_a_batch_is_padded() -> None:
    """Prompts end with a newline, padded on the left; answers end with an end token, padded on the right."""
    prompts = TOKENIZER.encode_prompts(["ab", "a"], torch.device("cpu"))
    assert prompts.mask.tolist() == [[True, True, True], [False, True, True]]
    assert prompts.tokens[1, 0] == TOKENIZER.pad
    assert INNER.decode(prompts.tokens[0]) == "ab\n"
    answers = TOKENIZER.encode_answers(["ab", "a"], torch.device("cpu"))
    assert answers.mask.tolist() == [[True, True, True], [True, True, False]]
    assert answers.tokens[1, 1:].tolist() == [*TOKENIZER.ends, TOKENIZER.pad]
    assert TOKENIZER.decode_responses(answers) == ["ab", "a"]
