"""The kinds of values that have rows: how each is counted, cut and joined.

The kinds of other libraries are found by their class's name, so that none of those libraries is imported here: whoever
holds a tensor has imported torch already.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import attrs

from colocate._system.by_type import by_type
from colocate._system.imported import imported
from colocate.errors import ConfigError, DispatchError


@attrs.define(eq=False)
class Memo:
    """What was already worked out during one operation.

    Jagged tensors compute together only when they hold the very same offsets, so those that shared them before an
    operation have to share them after it.
    """

    _found: dict[Hashable, tuple[Any, Any]] = attrs.field(factory=dict)

    def get(self, what: str, sources: Sequence[Any], extra: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make` for these very source objects, made once."""
        key = (what, *map(id, sources), extra)
        if key not in self._found:
            self._found[key] = (make(), tuple(sources))  # the sources are held, or their ids could be reused
        return self._found[key][0]


class Kind(abc.ABC):
    """One kind of leaf with rows."""

    @abc.abstractmethod
    def length(self, value: Any) -> int | None:
        """The number of rows, None when this very value has none (a 0-d tensor)."""

    @abc.abstractmethod
    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        """The rows from `start` to before `stop`."""

    @abc.abstractmethod
    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        """The parts, at least two, one after the other."""

    def split(self, value: Any, sizes: Sequence[int], memo: Memo) -> list[Any]:
        """Contiguous parts of these sizes, which add up to the length."""
        return [self.slice(value, start, stop, memo) for start, stop in pairwise(accumulate(sizes, initial=0))]


class _List(Kind):
    def length(self, value: Any) -> int | None:
        return len(value)

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        return value[start:stop]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        return list(chain.from_iterable(parts))


class _Array(Kind):
    def length(self, value: Any) -> int | None:
        return len(value) if value.ndim else None

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        return value[start:stop]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        import numpy as np

        if any(isinstance(part, np.ma.MaskedArray) for part in parts):
            concatenate: Callable[[Sequence[Any]], Any] = np.ma.concatenate  # the plain one would drop the masks
            return concatenate(parts)
        joined = np.concatenate(parts)
        if type(joined) is not type(parts[0]) and {*map(type, parts)} == {type(parts[0])}:  # one of a subclass
            return parts[0].__array_wrap__(joined)
        return joined


class _Tensor(Kind):
    def length(self, value: Any) -> int | None:
        if value.is_nested:
            return int(value.size(0)) if _is_jagged(value) else None
        return int(value.shape[0]) if value.dim() else None

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        if str(value.layout).startswith("torch.sparse_"):
            return _slice_sparse(value, start, stop)
        return _slice_jagged(value, start, stop, memo) if value.is_nested else value[start:stop]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        import torch

        device = parts[0].device
        parts = [part if part.device == device else part.to(device) for part in parts]
        if any(part.is_nested for part in parts):
            return _concat_jagged(parts, memo)
        if len({part.shape[1:] for part in parts}) > 1:  # torch lets an empty vector through whatever the others are
            raise ValueError(f"their shapes are {_listed(tuple(part.shape) for part in parts)}")
        return torch.cat(list(parts))

    def split(self, value: Any, sizes: Sequence[int], memo: Memo) -> list[Any]:
        if value.is_nested or str(value.layout).startswith("torch.sparse_"):
            return super().split(value, sizes, memo)
        return list(value.split(list(sizes)))


def _slice_sparse(value: Any, start: int, stop: int) -> Any:
    import torch

    if value.layout is not torch.sparse_coo:
        raise DispatchError(f"a tensor of layout {value.layout} can't be cut by rows; give it as .to_sparse_coo()")
    return value.narrow_copy(0, start, stop - start)


def _is_jagged(value: Any) -> bool:
    import torch

    return bool(value.layout is torch.jagged)


def _packed(value: Any, memo: Memo) -> tuple[Any, Any, int]:
    """A jagged tensor's values without holes, their offsets, and the dimension in which the values are ragged."""
    import torch

    dim, offsets, lengths = value._ragged_idx, value.offsets(), value.lengths()
    if lengths is None:
        return value.values(), offsets, dim - 1

    def add_up() -> Any:
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(offsets.dtype)

    items = [item for item in value.unbind() if item.shape[dim - 1]]
    values = torch.cat(items, dim - 1) if items else value.values().narrow(dim - 1, 0, 0)
    return values, memo.get("packed", [offsets, lengths], None, add_up), dim - 1


def _jagged(values: Any, offsets: Any, dim: int) -> Any:
    import torch

    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=dim + 1)


def _slice_jagged(value: Any, start: int, stop: int, memo: Memo) -> Any:
    values, offsets, dim = _packed(value, memo)
    first, last = int(offsets[start]), int(offsets[stop])
    part = memo.get("slice", [offsets], (start, stop), lambda: offsets[start : stop + 1] - first)
    return _jagged(values.narrow(dim, first, last - first), part, dim)


def _concat_jagged(parts: Sequence[Any], memo: Memo) -> Any:
    import torch

    if not all(part.is_nested and _is_jagged(part) for part in parts):
        raise ValueError("some of them are jagged tensors and some are not")
    packed = [_packed(part, memo) for part in parts]
    dim = packed[0][2]
    if any(other != dim for _, _, other in packed):
        raise ValueError("they are jagged in different dimensions")

    def chained() -> Any:
        starts = accumulate((int(offsets[-1]) for _, offsets, _ in packed), initial=0)
        shifted = [offsets[:-1] + start for (_, offsets, _), start in zip(packed, starts, strict=False)]
        end = sum(int(offsets[-1]) for _, offsets, _ in packed)
        return torch.cat([*shifted, packed[-1][1].new_tensor([end])])

    offsets = memo.get("concat", [offsets for _, offsets, _ in packed], None, chained)
    return _jagged(torch.cat([values for values, _, _ in packed], dim), offsets, dim)


class _TensorDict(Kind):
    """TensorDict and tensorclass; jagged entries, which their own indexing can't cut, are cut one by one."""

    def length(self, value: Any) -> int | None:
        return int(value.batch_size[0]) if value.batch_size else None

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        ragged = _ragged_entries(value)
        if not ragged:
            return value[start:stop]
        part = value.exclude(*ragged)[start:stop]
        for key in ragged:
            part.set(key, _slice_jagged(value.get(key), start, stop, memo))
        return _in_order(part, value, ragged)

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        import torch

        device = _device_of(parts[0])
        parts = [part if _device_of(part) in (device, None) else part.to(device) for part in parts]
        ragged = _ragged_entries(parts[0])
        if not ragged:
            return torch.cat(list(parts))
        whole: Any = torch.cat([part.exclude(*ragged) for part in parts])
        for key in ragged:
            whole.set(key, _concat_jagged([part.get(key) for part in parts], memo))
        return _in_order(whole, parts[0], ragged)


def _device_of(value: Any) -> Any:
    """Where a TensorDict is, by its own word or that of its first tensor; None when it has none."""
    if value.device is not None:
        return value.device
    if isinstance(value, sys.modules["tensordict"].LazyStackedTensorDict):  # looking inside would stack its rows
        return _device_of(value.tensordicts[0])
    return next((item.device for item in value.values(True, True) if hasattr(item, "is_cpu")), None)


def _ragged_entries(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    tensordict = sys.modules["tensordict"]
    if isinstance(value, tensordict.LazyStackedTensorDict):
        return []  # a list of rows: looking inside would stack them
    found = []
    for key, item in value.items():
        if tensordict.is_tensor_collection(item):
            found += _ragged_entries(item, (*prefix, key))
        elif getattr(item, "is_nested", False):
            found.append((*prefix, key))
    return found


def _in_order(made: Any, like: Any, ragged: list[tuple[str, ...]]) -> Any:
    """The same, with its keys as another has them, wherever jagged entries were put last."""
    for place in {key[:-1] for key in ragged}:
        (made.get(place) if place else made).select(*(like.get(place) if place else like).keys(), inplace=True)
    return made


@attrs.frozen
class Registered(Kind):
    """A type whose owner said how (`register_batch`)."""

    count: Callable[[Any], int]
    cut: Callable[[Any, Sequence[int]], Sequence[Any]]
    join: Callable[[Sequence[Any]], Any]

    def length(self, value: Any) -> int | None:
        return self.count(value)

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        return self.split(value, [start, stop - start, self.count(value) - stop], memo)[1]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        return self.join(parts)

    def split(self, value: Any, sizes: Sequence[int], memo: Memo) -> list[Any]:
        parts = list(self.cut(value, list(sizes)))
        made = [self.count(part) for part in parts]
        if made != list(sizes):
            raise DispatchError(
                f"{type(value).__qualname__}: the split given to register_batch made parts of {made} rows where "
                f"{list(sizes)} were asked for"
            )
        return parts


_kinds: dict[type, Kind] = {list: _List()}
_named_kinds: dict[str, Kind] = {
    "numpy.ndarray": _Array(),
    "torch.Tensor": _Tensor(),
    "tensordict.base.TensorDictBase": _TensorDict(),
}


@by_type
def is_collection(kind: type) -> bool:
    """Whether values of this type are TensorDicts, or of a tensorclass."""
    tensordict = imported("tensordict")
    if tensordict is None or not hasattr(kind, "batch_size"):  # tensordict keeps every type that it is asked about
        return False
    return bool(tensordict.is_tensor_collection(kind))


@by_type
def kind_of(cls: type) -> Kind | None:
    """How values of this type are counted, cut and joined; None when they have no rows.

    The nearest class in the method resolution order decides.
    """
    for base in cls.__mro__:
        kind = _kinds.get(base) or _named_kinds.get(f"{base.__module__}.{base.__qualname__}")
        if kind is not None:
            return kind
    if is_collection(cls):  # a tensorclass has no base class in common
        return _named_kinds["tensordict.base.TensorDictBase"]
    return None


def register(cls: type, kind: Registered) -> None:
    """Make `cls` and its subclasses a kind of leaf.

    Raises:
        ConfigError: Colocate knows the type already, or it was registered with other functions.
    """
    known = _kinds.get(cls) or _named_kinds.get(f"{cls.__module__}.{cls.__qualname__}")
    if cls in (tuple, dict, type(None), object) or (known is not None and not isinstance(known, Registered)):
        raise ConfigError(
            f"register_batch({cls.__qualname__}): colocate itself says what the rows of this type are; "
            "register a subclass of it, or a type of your own"
        )
    if known is not None and known != kind:
        raise ConfigError(
            f"register_batch({cls.__qualname__}): this type is registered already with other functions; "
            "register it once, in the module that defines it"
        )
    _kinds[cls] = kind
    kind_of.cache_clear()


def _listed(items: Any) -> str:
    """A few of the items, in words."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")
