"""Rows of values: splitting and joining are inverses, padding changes nothing that was there, errors have paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack
from tests.unit.rows import (
    LongText,
    Sample,
    Text,
    cut_text,
    equal,
    jagged,
    join_text,
    split,
    text_length,
    values_and_sizes,
)

import colocate
from colocate._values import batch
from colocate._values.leaves import kind_of, map_leaves
from colocate.errors import ConfigError, DispatchError

LAWS = settings(deadline=None, max_examples=40)


@LAWS
@given(values_and_sizes())
def test_split_then_concat_is_the_identity(case: tuple[Any, list[int]]) -> None:
    value, sizes = case
    before = map_leaves(value, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
    parts = split(value, sizes)
    assert len(parts) == len(sizes)
    for part, size in zip(parts, sizes, strict=True):
        assert batch.count_rows(part, "part") in (size, None)
    assert equal(batch.concat(parts, "value"), before)
    assert equal(value, before)


@LAWS
@given(values_and_sizes(), st.integers(-2, 18), st.integers(-2, 18), st.integers(0, 4))
def test_slices_and_padding(case: tuple[Any, list[int]], start: int, stop: int, more: int) -> None:
    """Slices are the rows in between; padding repeats the last row and leaves the rest."""
    value, sizes = case
    total = sum(sizes)
    low = min(max(start, 0), total)
    high = min(max(stop, low), total)
    assert equal(batch.slice_rows(value, start, stop), split(value, [low, high - low, total - high])[1])
    if not total or batch.count_rows(value, "value") is None:
        return
    padded = batch.pad(value, total + more)
    assert batch.rows(padded, "padded") == total + more
    assert equal(batch.slice_rows(padded, 0, total), value)
    last = batch.slice_rows(value, total - 1, total)
    for row in range(total, total + more):
        assert equal(batch.slice_rows(padded, row, row + 1), last)


def test_jagged_tensors_that_compute_together_still_do() -> None:
    """Torch allows arithmetic of jagged tensors only when they hold the same offsets."""
    a = jagged([2, 0, 3, 1])
    value = {"a": a, "b": a * 2, "td": TensorDict({"c": a + 1}, [4])}
    parts = split(value, [1, 3])
    for part in [*parts, batch.concat(parts, "value"), batch.pad(value, 6), batch.slice_rows(value, 1, 3)]:
        assert equal((part["a"] + part["b"]).values(), part["a"].values() * 3)
        assert equal((part["a"] + part["td"]["c"]).values(), part["a"].values() * 2 + 1)


def test_jagged_tensors_with_holes_lose_the_holes_only() -> None:
    dense = torch.arange(30.0).view(3, 5, 2)
    value = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 4]), torch.tensor([2, 0, 1]), layout=torch.jagged)
    parts = split(value.transpose(1, 2), [1, 2])
    assert sum(part.values().numel() for part in parts) == 6
    pieces = zip(batch.concat(parts, "value").unbind(), value.transpose(1, 2).unbind(), strict=True)
    assert all(torch.equal(x, y) for x, y in pieces)


def test_tensordict_rows_of_other_kinds() -> None:
    mixed = TensorDict({"a": torch.arange(4), "n": NonTensorStack("p", "q", "r", "s")}, [4])
    parts = split(mixed, [1, 3])
    assert list(parts[1]["n"]) == ["q", "r", "s"]
    assert list(batch.concat(parts, "value")["n"]) == ["p", "q", "r", "s"]
    lazy = lazy_stack([TensorDict({"a": torch.zeros(n)}, []) for n in (1, 2, 3)])
    parts = split(lazy, [2, 1])
    assert [item["a"].shape[0] for item in batch.concat(parts, "value").unbind(0)] == [1, 2, 3]
    sample = Sample(tokens=torch.arange(4), name="x", batch_size=[4])  # type: ignore[call-arg]
    parts = split(sample, [1, 3])
    assert [type(part) for part in parts] == [Sample, Sample]
    assert torch.equal(batch.concat(parts, "value").tokens, sample.tokens)


def test_what_is_whole_is_handed_on_as_it_is() -> None:
    """A group of one rank pays nothing for its batches."""
    value = {"a": torch.ones(3), "b": [1, 2, 3]}
    part = split(value, [3])[0]
    assert part["a"] is value["a"]
    assert part["b"] is value["b"]
    assert batch.concat([value], "value") is value
    assert batch.pad(value, 3) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"ids": torch.ones(4), "lr": 0.1}, "batch['lr'] (float) has no rows"),
        ({"x": (torch.ones(2), torch.tensor(1.0))}, "batch['x'][1] (0-d Tensor) has no rows"),
        ("prompts", "batch (str) has no rows"),
        (None, "batch is None, which has no rows"),
        ({"x": None}, "batch (dict) holds nothing but None"),
        (TensorDict({"a": torch.ones(3)}, []), "batch (0-d TensorDict) has no rows"),
        ({"a": [1, 2], "b": (torch.ones(3),)}, "batch['a'] has 2 rows but batch['b'][0] has 3"),
        (object(), "colocate.register_batch"),
    ],
)
def test_values_without_rows_are_refused_with_their_path(value: Any, message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        batch.rows(value, "batch")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"a": [1]}, {"b": [1]}], "part 0 has the keys ['a'] and part 1 has the keys ['b']"),
        ([{"a": [1]}, [1]], "part 0 has the keys ['a'] and part 1 has a list"),
        ([None, [1]], "that of part 0 is None and that of part 1 is not"),
        ([{"a": [1]}, {"a": None}], "x['a']: that of part 0 is a list and that of part 1 is None"),
        ([[1], torch.ones(1)], "that of part 0 is a list and that of part 1 is Tensor"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "their shapes are (2, 3), (2, 4); make them alike"),
        ([np.ones((2, 3)), np.ones((2, 4))], "can't be joined"),
        ([jagged([1]), torch.ones(1, 1, 2)], "some of them are jagged tensors and some are not"),
        ([jagged([1]), jagged([1]).transpose(1, 2)], "jagged in different dimensions"),
    ],
)
def test_parts_that_differ_are_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(DispatchError) as caught:
        batch.concat(parts, "x")
    assert message in str(caught.value)


def test_registering_twice() -> None:
    """The same again is allowed, since modules get imported again; anything else is not."""
    again = {"length": text_length, "split": cut_text, "concat": join_text}
    colocate.register_batch(Text, **again)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="registered already with other functions"):
        colocate.register_batch(Text, length=lambda value: 0, split=cut_text, concat=join_text)
    for known in (list, dict, tuple, np.ndarray, torch.Tensor):
        with pytest.raises(ConfigError, match="colocate itself says"):
            colocate.register_batch(known, **again)  # type: ignore[arg-type]


def test_the_nearest_registered_class_decides() -> None:
    class Shout(LongText):
        pass

    assert kind_of(Shout) is kind_of(Text)
    colocate.register_batch(Shout, length=lambda value: 7, split=cut_text, concat=join_text)  # type: ignore[arg-type]
    assert batch.rows(Shout("abc"), "x") == 7
    assert batch.rows(LongText("abc"), "x") == 3


def test_a_registered_split_that_miscounts_is_found_out() -> None:
    class Odd(Text):
        pass

    colocate.register_batch(Odd, length=text_length, split=lambda value, sizes: [value], concat=join_text)  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match=r"parts of \[3\] rows where \[1, 2\] were asked for"):
        split({"x": Odd("abc")}, [1, 2])
