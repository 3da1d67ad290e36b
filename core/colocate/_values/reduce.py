"""Several results as one: numbers, tensors and arrays, leaf by leaf."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colocate._system.imported import imported
from colocate._values.tree import check_alike, is_container, rebuild_dict, rebuild_tuple
from colocate.errors import DispatchError

OPERATIONS = ("mean", "sum", "max", "min")
_NUMBERS = frozenset({int, float, bool, complex})


def reduce_values(values: Sequence[Any], operation: str, weights: Sequence[int] | None, ranks: Sequence[int]) -> Any:
    """One value of the structure that all values have.

    The types that come out don't depend on how many values there are: a mean of whole numbers is a float.

    Args:
        values: The values, one at least.
        operation: One of `OPERATIONS`.
        weights: For a mean, above 0; None weighs equally.
        ranks: Whose values these are, for errors.

    Raises:
        DispatchError: The values differ in structure or shape, or a leaf can't be reduced.
    """
    return _Reduction(operation, weights or [1] * len(values), ranks).walk(values, ())


@attrs.frozen
class _Reduction:
    operation: str
    weights: Sequence[int]
    ranks: Sequence[int]

    def walk(self, values: Sequence[Any], keys: tuple[Any, ...]) -> Any:
        first: Any = values[0]
        is_mapping = isinstance(first, dict) or (is_container(first) and not isinstance(first, tuple))
        if first is None or is_mapping or isinstance(first, (list, tuple)):
            check_alike(values, _path(keys), self._label)
        if is_mapping and isinstance(first, Mapping):
            items = {key: self.walk([value[key] for value in values], (*keys, key)) for key in first}
            return rebuild_dict(first, items)
        if isinstance(first, (list, tuple)):
            rows = [self.walk(items, (*keys, i)) for i, items in enumerate(zip(*values, strict=True))]
            return rows if isinstance(first, list) else rebuild_tuple(first, rows)
        return None if first is None else self._leaf(values, keys)

    def _leaf(self, values: Sequence[Any], keys: tuple[Any, ...]) -> Any:
        if all(type(value) in _NUMBERS for value in values):
            return self._reduced(_number, values, keys)
        family, path = _family(values[0]), _path(keys)
        for index, value in enumerate(values):
            if family is None or _family(value) is not family:
                what = "None" if value is None else f"a {type(value).__name__}"
                others = "" if family is None else f", where {self._label(0)} has a {type(values[0]).__name__}"
                raise DispatchError(
                    f"{path}: {self._label(index)} has {what}{others}; numbers, tensors and arrays alike on all ranks "
                    "can be reduced, so return those, or collect with Gather or First",
                    rank=self.ranks[index],
                )
            if family is not _number and value.shape != values[0].shape:
                raise DispatchError(
                    f"{path}: the shapes are {tuple(values[0].shape)} on {self._label(0)} and {tuple(value.shape)} on "
                    f"{self._label(index)}; equal shapes can be reduced",
                    rank=self.ranks[index],
                )
        return self._reduced(family, values, keys)

    def _reduced(self, family: Any, values: Sequence[Any], keys: tuple[Any, ...]) -> Any:
        try:
            return family(values, self.operation, self.weights)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            name = type(values[0]).__name__
            raise DispatchError(f"{_path(keys)}: no {self.operation} can be made of {name}: {error}") from error

    def _label(self, index: int) -> str:
        return f"rank {self.ranks[index]}"


def _path(keys: tuple[Any, ...]) -> str:
    return "the results" + "".join(f"[{key!r}]" for key in keys)


def _family(value: Any) -> Any:
    """The function that reduces such values, None when there is none."""
    if isinstance(value, numbers.Number):
        return _number
    numpy = imported("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        return _number
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _array
    torch = imported("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return None if value.is_nested else _tensor
    return None


def _number(values: Sequence[Any], operation: str, weights: Sequence[int]) -> Any:
    numpy = imported("numpy")
    if numpy is not None and operation in ("mean", "sum") and any(map(_is_narrow, values)):
        return _array(list(map(numpy.asarray, values)), operation, weights)[()]
    if operation == "mean":
        return sum(map(operator.mul, values, weights)) / sum(weights)
    if operation == "sum":
        return sum(values)
    # Python's own max and min let a NaN through or not, depending on where it stands.
    strange = [value for value in values if value != value]
    return strange[0] if strange else max(values) if operation == "max" else min(values)


def _is_narrow(value: Any) -> bool:
    """Whether it is a NumPy number, which its own products with the rows of a rank may be too large for."""
    return getattr(getattr(value, "dtype", None), "kind", "") in ("b", "i", "u", "f", "c")


def _array(values: Sequence[Any], operation: str, weights: Sequence[int]) -> Any:
    import numpy as np

    if operation == "mean":
        dtype = np.result_type(*values)
        inexact = dtype if dtype.kind in "fc" else np.result_type(dtype, np.float64)
        total = sum(weights)
        wide = np.result_type(inexact, np.float32)  # halves lose too much on the way
        parts = (value.astype(wide) * (weight / total) for value, weight in zip(values, weights, strict=True))
        return np.asanyarray(functools.reduce(np.add, parts)).astype(inexact)  # a masked one stays masked
    if operation == "sum":
        return _array_sum(values)
    return functools.reduce(np.maximum if operation == "max" else np.minimum, values)


def _array_sum(values: Sequence[Any]) -> Any:
    """The sum; of whole numbers in the largest type of their kind, as NumPy's own sum is."""
    import numpy as np

    dtype = np.result_type(*values)
    if dtype.kind == "f":
        wide = np.result_type(dtype, np.float32)  # halves lose too much on the way
        return np.asanyarray(functools.reduce(np.add, [value.astype(wide) for value in values])).astype(dtype)
    if dtype.kind in "biu":
        largest = np.uint64 if dtype.kind == "u" else np.int64
        values = [value.astype(largest) for value in values]
    return functools.reduce(np.add, values)


def _tensor(values: Sequence[Any], operation: str, weights: Sequence[int]) -> Any:
    import torch

    values = [value.detach().to(values[0].device) for value in values]
    if operation == "mean":
        return _tensor_mean(values, weights)
    if operation == "sum":
        return _tensor_sum(values)
    return functools.reduce(torch.maximum if operation == "max" else torch.minimum, values)


def _tensor_sum(values: Sequence[Any]) -> Any:
    """The sum; of whole numbers as int64, as torch's own sum is."""
    import torch

    dtype = functools.reduce(torch.promote_types, [value.dtype for value in values])
    wide = dtype
    if dtype.is_floating_point:
        wide = torch.promote_types(dtype, torch.float32)  # halves lose too much on the way
    elif not dtype.is_complex and not values[0].is_quantized and dtype is not torch.uint64:
        dtype = wide = torch.int64
    return functools.reduce(torch.add, [value.to(wide) for value in values]).to(dtype)


def _tensor_mean(values: Sequence[Any], weights: Sequence[int]) -> Any:
    import torch

    dtype = functools.reduce(torch.promote_types, [value.dtype for value in values])
    inexact = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    if len(values) == 1:
        return values[0].to(inexact)
    total, wide = sum(weights), torch.promote_types(inexact, torch.float32)  # halves lose too much on the way
    mean = values[0].to(wide) * (weights[0] / total)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean.add_(value.to(wide), alpha=weight / total)
    return mean.to(inexact)
