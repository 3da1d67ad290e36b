"""Values with rows, of every kind that is known or registered, and whether two of them are the same."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass

import colocate
from colocate._values.batch import leaf_splitter
from colocate._values.leaves import take_apart


class Pair(NamedTuple):
    left: Any
    right: Any


class Text:
    """A type that nobody but `register_batch` knows the rows of."""

    def __init__(self, lines: str) -> None:
        self.lines = lines

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Text) and other.lines == self.lines

    __hash__ = None  # type: ignore[assignment]


class LongText(Text):
    pass


def cut_text(value: Text, sizes: Sequence[int]) -> list[Text]:
    bounds = np.cumsum([0, *sizes])
    return [type(value)(value.lines[a:b]) for a, b in itertools.pairwise(bounds)]


def join_text(parts: Sequence[Text]) -> Text:
    return type(parts[0])("".join(part.lines for part in parts))


def text_length(value: Text) -> int:
    return len(value.lines)


colocate.register_batch(Text, length=text_length, split=cut_text, concat=join_text)


@tensorclass
class Sample:
    tokens: torch.Tensor
    name: str


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same: types, dtypes, order and contents."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.is_nested:
            pieces = zip(a.unbind(), b.unbind(), strict=True)
            return a.dtype == b.dtype and a.size(0) == b.size(0) and all(equal(x, y) for x, y in pieces)
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ma.MaskedArray):
        return bool((a.mask == b.mask).all()) and bool((a.compressed() == b.compressed()).all())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, TensorDict):
        keys = list(a.keys(True, True))
        return (
            a.batch_size == b.batch_size and keys == list(b.keys(True, True)) and all(equal(a[k], b[k]) for k in keys)
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def jagged(lengths: Sequence[int], width: int | None = 2) -> torch.Tensor:
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    values = torch.arange(int(offsets[-1]) * (width or 1), dtype=torch.float32)
    return torch.nested.nested_tensor_from_jagged(values.view(-1, width) if width else values, offsets=offsets)


@st.composite
def leaves(draw: st.DrawFn, rows: int) -> Any:
    kind = draw(st.sampled_from(["tensor", "jagged", "array", "masked", "list", "text", "td", "none"]))
    if kind == "tensor":
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
        width = draw(st.sampled_from([(), (3,), (2, 0)]))
        return torch.arange(rows * int(np.prod(width))).reshape(rows, *width).to(dtype)
    if kind == "jagged":
        return jagged(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)), draw(st.sampled_from([None, 2])))
    if kind == "array":
        return np.arange(rows * 2).reshape(rows, 2).astype(draw(st.sampled_from(["f4", "i2", "U3", "O"])))
    if kind == "masked":
        return np.ma.masked_array(np.arange(rows), mask=draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    if kind == "list":
        return draw(st.lists(st.one_of(st.integers(), st.text(), st.none()), min_size=rows, max_size=rows))
    if kind == "text":
        return draw(st.sampled_from([Text, LongText]))("abcdefghijklmnop"[:rows])
    if kind == "td":
        inner = TensorDict({"b": torch.ones(rows, 2)}, [rows])
        found = TensorDict({"a": torch.arange(rows), "in": inner}, [rows])
        if draw(st.booleans()):
            found["in", "ragged"] = jagged([1] * rows)
        return found.lock_() if draw(st.booleans()) else found
    return None


@st.composite
def values(draw: st.DrawFn, rows: int) -> Any:
    """A value with so many rows in every leaf that isn't None."""

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.one_of(st.text(max_size=3), st.integers())
        return st.one_of(
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
            st.dictionaries(keys, inner, max_size=3).map(lambda items: collections.defaultdict(list, items)),
        )

    return draw(st.recursive(leaves(rows), nest, max_leaves=5))


@st.composite
def values_and_sizes(draw: st.DrawFn) -> tuple[Any, list[int]]:
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    return draw(values(sum(sizes))), sizes


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Contiguous parts with these numbers of rows, which add up to those of the value."""
    return take_apart(value, len(sizes), leaf_splitter(sizes))
