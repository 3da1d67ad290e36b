"""Random values with rows, and their exact comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
ARRAYS = ("float64", "float32", "int32", "bool", "<U4", "complex64", "object")
SHAPES = st.sampled_from([(), (2,), (1, 3), (0,)])
STARTS = st.integers(0, 5)
ITEMS = st.one_of(
    st.integers(-3, 3),
    st.text("ab", max_size=2),
    st.none(),
    st.lists(st.integers(0, 2), max_size=2),
    st.dictionaries(st.sampled_from("xy"), st.booleans(), max_size=2),
)


def tensors(rows: int) -> st.SearchStrategy[torch.Tensor]:
    """Draw dense tensors with so many rows, of every dtype."""

    def made(dtype: torch.dtype, shape: tuple[int, ...], start: int) -> torch.Tensor:
        return _counted((rows, *shape), start).to(dtype)

    return st.builds(made, st.sampled_from(DTYPES), SHAPES, STARTS)


def arrays(rows: int) -> st.SearchStrategy[Any]:
    """Draw NumPy arrays with so many rows."""

    def made(dtype: str, shape: tuple[int, ...], start: int) -> Any:
        return _counted((rows, *shape), start).numpy().astype(dtype)

    return st.builds(made, st.sampled_from(ARRAYS), SHAPES, STARTS)


def jagged(rows: int) -> st.SearchStrategy[torch.Tensor]:
    """Draw jagged tensors with so many rows."""
    lengths = st.lists(st.integers(0, 3), min_size=rows, max_size=rows)
    return st.builds(_jagged, lengths)


def records(rows: int) -> st.SearchStrategy[Any]:
    """Draw TensorDicts with so many rows."""
    return st.builds(lambda a, b: TensorDict({"a": a, "b": b}, batch_size=[rows]), tensors(rows), tensors(rows))


def lists(rows: int) -> st.SearchStrategy[list[Any]]:
    """Draw lists with so many items."""
    return st.lists(ITEMS, min_size=rows, max_size=rows)


def values(rows: int, ragged: bool) -> st.SearchStrategy[Any]:
    """Draw leaves with rows, and dicts and tuples of leaves."""
    leaves = [tensors(rows), lists(rows), arrays(rows), records(rows)]
    leaf = st.one_of(*leaves, jagged(rows)) if ragged and rows else st.one_of(*leaves)
    two = st.tuples(leaf, st.none() | leaf)
    return st.one_of(leaf, two, two.map(lambda pair: {"p": pair[0], "q": (pair[1], pair[0])}))


def _counted(shape: tuple[int, ...], start: int) -> torch.Tensor:
    # Small whole numbers are exact in every dtype.
    return torch.arange(start, start + int(np.prod(shape))).reshape(shape)


def _jagged(lengths: list[int]) -> torch.Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(_counted((sum(lengths), 2), 1).float(), offsets=offsets)


def difference(left: Any, right: Any, path: str = "value") -> str | None:
    """Return the first difference of two values in words, or None if they are equal to the last bit."""
    if type(left) is not type(right):
        return f"{path}: {type(left).__name__} and {type(right).__name__}"
    if isinstance(left, torch.Tensor):
        return _tensors_differ(left, right, path)
    if isinstance(left, np.ndarray):
        same = left.dtype == right.dtype and left.shape == right.shape and left.tolist() == right.tolist()
        return None if same else f"{path}: {left!r} and {right!r}"
    if isinstance(left, TensorDict):
        if left.batch_size != right.batch_size:
            return f"{path}: {left.batch_size} and {right.batch_size}"
        return difference(dict(left.items()), dict(right.items()), path)
    if isinstance(left, dict):
        if list(left) != list(right):
            return f"{path}: the keys {list(left)} and {list(right)}"
        return _first(difference(left[key], right[key], f"{path}[{key!r}]") for key in left)
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return f"{path}: {len(left)} and {len(right)} items"
        return _first(difference(*pair, f"{path}[{i}]") for i, pair in enumerate(zip(left, right, strict=True)))
    return None if left == right else f"{path}: {left!r} and {right!r}"


def _tensors_differ(left: torch.Tensor, right: torch.Tensor, path: str) -> str | None:
    for what in ("dtype", "is_nested", "requires_grad"):
        if getattr(left, what) != getattr(right, what):
            return f"{path}.{what}: {getattr(left, what)} and {getattr(right, what)}"
    if left.is_inference() or right.is_inference():
        return f"{path}: an inference tensor came out"
    if left.is_nested:
        return difference(list(left.unbind()), list(right.unbind()), path)
    if left.shape != right.shape or left.tolist() != right.tolist():
        return f"{path}: {left!r} and {right!r}"
    return None


def _first(found: Any) -> str | None:
    return next((words for words in found if words is not None), None)
