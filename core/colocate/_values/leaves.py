"""Values with rows: the kinds of their leaves, how each is counted, cut and joined, and the ways to the leaves.

A value is a leaf with rows, a tuple or mapping of values, or None. The kinds of other libraries are found by their
class's name, so that none of those libraries is imported here: whoever holds a tensor has imported torch already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import attrs

from colocate import features
from colocate._system.by_type import by_type
from colocate._system.imported import imported
from colocate.errors import DispatchError

Label = Callable[[int], str]
"""What to call one of several values in an error."""


@attrs.define(eq=False)
class Memo:
    """What was already worked out during one operation.

    Jagged tensors compute together only when they hold the very same offsets, so those that shared them before an
    operation have to share them after it.
    """

    _found: dict[Hashable, tuple[Any, Any]] = attrs.field(factory=dict)

    def get(self, what: str, sources: Sequence[Any], extra: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make` for these very source objects, made once."""
        key = (what, *map(id, sources), extra)
        if key not in self._found:
            self._found[key] = (make(), tuple(sources))  # the sources are held, or their ids could be reused
        return self._found[key][0]


class Kind:
    """One kind of leaf with rows; this one is a list's."""

    def length(self, value: Any) -> int | None:
        """Return the number of rows, None when this very value has none (a 0-d tensor)."""
        return len(value)

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        """Return the rows from `start` to before `stop`."""
        return value[start:stop]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        """Join the parts, at least two, one after the other."""
        return list(chain.from_iterable(parts))

    def split(self, value: Any, sizes: Sequence[int], memo: Memo) -> list[Any]:
        """Cut contiguous parts of these sizes, which add up to the length."""
        return [self.slice(value, start, stop, memo) for start, stop in pairwise(accumulate(sizes, initial=0))]

    def items(self, value: Any, memo: Memo) -> Sequence[Any]:
        """Return the rows one by one: of a list its items, of a tensor with an axis less."""
        return list(value.unbind(0)) if hasattr(value, "unbind") else list(value)

    def take(self, value: Any, rows: Sequence[int], memo: Memo) -> Any:
        """Return these rows, in this order."""
        runs: list[tuple[int, int]] = []
        for row in rows:
            if runs and runs[-1][1] == row:
                runs[-1] = runs[-1][0], row + 1
            else:
                runs.append((row, row + 1))
        if len(runs) < 2:
            return self.slice(value, *(runs or [(0, 0)])[0], memo)
        return self._take(value, rows, runs, memo)

    def _take(self, value: Any, rows: Sequence[int], runs: Sequence[tuple[int, int]], memo: Memo) -> Any:
        return self.concat([self.slice(value, *run, memo) for run in runs], memo)


class _Array(Kind):
    def length(self, value: Any) -> int | None:
        return len(value) if value.ndim else None

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        import numpy as np

        if any(isinstance(part, np.ma.MaskedArray) for part in parts):
            concatenate: Callable[[Sequence[Any]], Any] = np.ma.concatenate  # the plain one would drop the masks
            return concatenate(parts)
        joined = np.concatenate(parts)
        if type(joined) is not type(parts[0]) and {*map(type, parts)} == {type(parts[0])}:  # one of a subclass
            return parts[0].__array_wrap__(joined)
        return joined

    def _take(self, value: Any, rows: Sequence[int], runs: Sequence[tuple[int, int]], memo: Memo) -> Any:
        return value[list(rows)]


class _Tensor(Kind):
    def length(self, value: Any) -> int | None:
        if value.is_nested:
            return int(value.size(0)) if str(value.layout) == "torch.jagged" else None
        return int(value.shape[0]) if value.dim() else None

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        layout = str(value.layout)
        if layout == "torch.sparse_coo":
            return value.narrow_copy(0, start, stop - start)
        if layout.startswith("torch.sparse_"):
            raise DispatchError(f"a tensor of layout {layout} can't be cut by rows; give it as .to_sparse_coo()")
        return slice_jagged(value, start, stop, memo) if value.is_nested else value[start:stop]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        import torch

        device = parts[0].device
        parts = [part if part.device == device else part.to(device) for part in parts]
        if any(part.is_nested for part in parts):
            return concat_jagged(parts, memo)
        shapes = [tuple(part.shape) for part in parts]
        if len({shape[1:] for shape in shapes}) > 1:  # torch lets an empty vector through whatever the others are
            more = f" and {len(shapes) - 6} more" if len(shapes) > 6 else ""
            raise ValueError(f"their shapes are {', '.join(map(str, shapes[:6]))}{more}")
        return torch.cat(list(parts))

    def split(self, value: Any, sizes: Sequence[int], memo: Memo) -> list[Any]:
        if value.is_nested or str(value.layout).startswith("torch.sparse_"):
            return super().split(value, sizes, memo)
        return list(value.split(list(sizes)))

    def _take(self, value: Any, rows: Sequence[int], runs: Sequence[tuple[int, int]], memo: Memo) -> Any:
        if value.is_nested or str(value.layout) != "torch.strided":
            return super()._take(value, rows, runs, memo)
        return value[list(rows)]


def _packed(value: Any, memo: Memo) -> tuple[Any, Any, int]:
    """Return a jagged tensor's values without holes, their offsets, and the dimension in which they are ragged."""
    import torch

    dim, offsets, lengths = value._ragged_idx, value.offsets(), value.lengths()
    if lengths is None:
        return value.values(), offsets, dim - 1

    def add_up() -> Any:
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(offsets.dtype)

    items = [item for item in value.unbind() if item.shape[dim - 1]]
    values = torch.cat(items, dim - 1) if items else value.values().narrow(dim - 1, 0, 0)
    return values, memo.get("packed", [offsets, lengths], None, add_up), dim - 1


def slice_jagged(value: Any, start: int, stop: int, memo: Memo) -> Any:
    """Cut rows of a jagged tensor."""
    import torch

    values, offsets, dim = _packed(value, memo)
    first, last = int(offsets[start]), int(offsets[stop])
    part = memo.get("slice", [offsets], (start, stop), lambda: offsets[start : stop + 1] - first)
    values = values.narrow(dim, first, last - first)
    return torch.nested.nested_tensor_from_jagged(values, offsets=part, jagged_dim=dim + 1)


def concat_jagged(parts: Sequence[Any], memo: Memo) -> Any:
    """Join jagged tensors."""
    import torch

    if not all(part.is_nested and part.layout is torch.jagged for part in parts):
        raise ValueError("some of them are jagged tensors and some are not")
    packed = [_packed(part, memo) for part in parts]
    dim = packed[0][2]
    if any(other != dim for _, _, other in packed):
        raise ValueError("they are jagged in different dimensions")

    def chained() -> Any:
        *starts, end = accumulate((int(offsets[-1]) for _, offsets, _ in packed), initial=0)
        shifted = [offsets[:-1] + start for (_, offsets, _), start in zip(packed, starts, strict=True)]
        return torch.cat([*shifted, packed[-1][1].new_tensor([end])])

    offsets = memo.get("concat", [offsets for _, offsets, _ in packed], None, chained)
    values = torch.cat([values for values, _, _ in packed], dim)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=dim + 1)


kinds: dict[type, Kind] = {list: Kind()}
"""The kinds of types: a list's, and those that were registered."""
NAMED = {"numpy.ndarray": _Array(), "torch.Tensor": _Tensor()}


@by_type
def is_collection(kind: type) -> bool:
    """Whether values of this type are TensorDicts, or of a tensorclass."""
    tensordict = imported("tensordict")
    if tensordict is None or not hasattr(kind, "batch_size"):  # tensordict keeps every type that it is asked about
        return False
    return bool(tensordict.is_tensor_collection(kind))


@by_type
def kind_of(cls: type) -> Kind | None:
    """Return how values of this type are counted, cut and joined; None when they have no rows.

    The nearest class in the method resolution order decides.
    """
    for base in cls.__mro__:
        kind = kinds.get(base) or NAMED.get(f"{base.__module__}.{base.__qualname__}")
        if kind is not None:
            return kind
    return features.module("kinds.tensordicts").KIND if is_collection(cls) else None


def is_container(value: Any) -> bool:
    """Whether the value is a tuple or mapping of values, and not itself a leaf with rows."""
    return _is_container(type(value))


@by_type
def _is_container(kind: type) -> bool:
    return issubclass(kind, (Mapping, tuple)) and kind_of(kind) is None


def leaves(value: Any) -> list[Any]:
    """Return every leaf but None, in order."""
    if not is_container(value):
        return [] if value is None else [value]
    found = []
    for item in value if isinstance(value, tuple) else value.values():
        if is_container(item):
            found += leaves(item)
        elif item is not None:
            found.append(item)
    return found


def named_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Give every leaf but None with its path, in order."""
    if value is None:
        return
    if not is_container(value):
        yield path, value
        return
    for key, item in enumerate(value) if isinstance(value, tuple) else value.items():
        yield from named_leaves(item, f"{path}[{key!r}]")


def map_leaves(
    value: Any,
    leaf: Callable[[Any], Any],
    matters: Callable[[type], bool] | None = None,
    key: Callable[[Any], object] | None = None,
) -> Any:
    """Replace each leaf of nested lists, tuples and dicts by `leaf(it)`; what nothing changed in is the same object.

    With `matters`, `leaf` is asked of no other types, and long lists of what doesn't matter are cheap. `key` looks at
    each key that is no string; keys stay as they are.
    """
    if isinstance(value, dict):
        if key is not None:
            for name in value:
                if type(name) is not str:
                    key(name)
        changed = {name: new for name, old in value.items() if (new := map_leaves(old, leaf, matters, key)) is not old}
        return rebuild(value, changed) if changed else value
    if isinstance(value, (list, tuple)):
        if matters is not None:
            for kind in set(map(type, value)):
                if issubclass(kind, (dict, list, tuple)) or matters(kind):
                    break
            else:
                return value
        items = [map_leaves(item, leaf, matters, key) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return rebuild(value, items) if isinstance(value, tuple) else items
    return leaf(value) if matters is None or matters(type(value)) else value


def take_apart(value: Any, count: int, leaf: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """Return `count` values of the structure of this one, where `leaf` gives the parts of each leaf."""
    if value is None:
        return [None] * count
    if not is_container(value):
        return list(leaf(value))
    if not value:
        return [value] * count
    if not isinstance(value, tuple):
        columns = [take_apart(item, count, leaf) for item in value.values()]
        return [rebuild(value, dict(zip(value, items, strict=True))) for items in zip(*columns, strict=True)]
    return [rebuild(value, items) for items in zip(*(take_apart(i, count, leaf) for i in value), strict=True)]


def rebuild(value: Any, items: Any) -> Any:
    """Make a mapping or tuple of the same type and order with these items in place of its own: of a tuple, with all.

    A mapping that is no dict, such as a `UserDict` or a tokenizer's `BatchEncoding`, is made by its class of a dict:
    what it has besides its items may be of its rows.
    """
    kind = type(value)
    if kind is dict:
        return items if len(items) == len(value) else {**value, **items}
    if kind is tuple:
        return tuple(items)
    if isinstance(value, dict):
        new = copy.copy(value)  # the one way that keeps what subclasses hold besides their items
        for key, item in items.items():
            new[key] = item
        return new
    make, instead = kind, "Make it of a dict alone, or pass that"
    if isinstance(value, tuple):
        make = getattr(kind, "_make", kind)
        instead = "Give the class a classmethod _make(items), as a named tuple has it, or pass a plain tuple"
    elif all(items.get(key) is item for key, item in value.items()):
        return value
    else:
        items = {**value, **items}
    try:
        return make(items)
    except Exception as error:
        raise DispatchError(f"no {kind.__qualname__} can be made of other items: {error}. {instead}") from error


def check_alike(values: Sequence[Any], path: str, label: Label) -> None:
    """Raise a `DispatchError` unless all values are None, or have the keys or the length of the first."""
    first = values[0]
    for index, value in enumerate(values):
        if (value is None) is not (first is None):
            gone, there = (index, 0) if value is None else (0, index)
            raise DispatchError(f"{path}: that of {label(gone)} is None and that of {label(there)} is not")
        if isinstance(first, Mapping):
            if not isinstance(value, Mapping) or value.keys() != first.keys():
                shown = f"the keys {list(value)}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
                raise DispatchError(
                    f"{path}: {label(0)} has the keys {list(first)} and {label(index)} has {shown}; they have "
                    "to be equal"
                )
        elif isinstance(first, (list, tuple)):
            kind = list if isinstance(first, list) else tuple
            if not isinstance(value, kind) or len(value) != len(first):
                shown = f"one of {len(value)}" if isinstance(value, kind) else f"a {type(value).__name__}"
                raise DispatchError(
                    f"{path}: {label(0)} has a {kind.__name__} of {len(first)} items and {label(index)} has {shown}; "
                    "they have to be equal"
                )
