"""The character tokenizer."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from colocate_ppo.tokenizer import character_tokenizer

PHRASE = "Spell this word backward (example: sun -> nus): "
TOKENIZER = character_tokenizer([PHRASE])
CHARACTERS = "\n " + string.ascii_letters + string.digits + string.punctuation


@given(st.text(alphabet=CHARACTERS))
def test_every_text_comes_back(text: str) -> None:
    plain = character_tokenizer()
    tokens = plain(text)["input_ids"]
    assert len(tokens) == len(text)
    assert plain.decode(tokens) == text


@given(st.text(alphabet=string.ascii_letters, max_size=5))
def test_a_phrase_is_one_token(word: str) -> None:
    tokens = TOKENIZER(f"{PHRASE}{word}\n")["input_ids"]
    assert len(tokens) == 1 + len(word) + 1
    assert TOKENIZER.decode(tokens) == f"{PHRASE}{word}\n"


def test_unknown_characters_are_marked() -> None:
    assert TOKENIZER("ä")["input_ids"] == [TOKENIZER.unk_token_id]


def test_prompts_are_padded_on_the_left() -> None:
    batch = TOKENIZER(["ab", "a"], padding=True)
    assert batch["attention_mask"] == [[1, 1], [0, 1]]
    assert batch["input_ids"][1][0] == TOKENIZER.pad_token_id


def test_special_tokens_vanish_from_text() -> None:
    tokens = [*TOKENIZER("ab")["input_ids"], TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == "ab"
