"""Implements `register_batch`, which registers users' types as batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from colocate._definitions.structure import Structure, register_structure
from colocate._system.by_type import clear_caches
from colocate._values.kinds import NAMED, Kind, Memo, find_kind, kinds
from colocate.errors import ConfigError, DispatchError

B = TypeVar("B")
_OWN = {*NAMED, "tensordict.base.TensorDictBase"}


@attrs.frozen
class _RegisteredKind(Kind):
    count: Callable[[Any], int]
    cut: Callable[[Any, Sequence[int]], Sequence[Any]]
    join: Callable[[Sequence[Any]], Any]
    structure: Structure | None

    def length(self, value: Any) -> int | None:
        return self.count(value)

    def slice(self, value: Any, start: int, stop: int, memo: Memo) -> Any:
        return self.split(value, [start, stop - start, self.count(value) - stop], memo)[1]

    def concat(self, parts: Sequence[Any], memo: Memo) -> Any:
        return self.join(parts)

    def split(self, value: Any, sizes: Sequence[int], memo: Memo) -> list[Any]:
        parts = list(self.cut(value, list(sizes)))
        lengths = [self.count(part) for part in parts]
        if lengths != list(sizes):
            raise DispatchError(
                f"{type(value).__qualname__}: the split given to register_batch made parts of {lengths} rows where "
                f"{list(sizes)} were asked for"
            )
        return parts

    def items(self, value: Any, memo: Memo) -> Sequence[Any]:
        return self.split(value, [1] * self.count(value), memo)


def register_batch(
    cls: type[B],
    *,
    length: Callable[[B], int],
    split: Callable[[B, Sequence[int]], Sequence[B]],
    concat: Callable[[Sequence[B]], B],
    leaves: Callable[[B], Mapping[Any, Any] | Sequence[Any]] | None = None,
    rebuild: Callable[[type[B], Any], B] | None = None,
) -> None:
    """Register a type and all subclasses as batches of rows, for scatter and gather.

    Register in the module that defines the type: workers import it too. With `leaves` and `rebuild` colocate looks
    into a value as into a dict of its leaves: a kept value has no graph, its bytes are counted, writes into it are
    noticed, and its tensors go to the worker's device. It is sent as its leaves, with tensors and arrays uncopied,
    instead of pickled. Without both the value is opaque.

    Args:
        cls: The type.
        length: The number of rows of a value.
        split: `split(value, sizes)` returns contiguous parts with these numbers of rows; the value stays unchanged.
        concat: The inverse: one value from parts.
        leaves: `leaves(value)` returns the value's contents: a mapping, list or tuple of tensors, arrays and other
            values, with nested dicts and lists. It is called often and must not copy.
        rebuild: `rebuild(cls, leaves)` makes a value of the type, or of a subclass, from the result of `leaves`: a
            dict, list or tuple.

    Raises:
        ConfigError: The type is registered already with other functions; or only one of `leaves` and `rebuild` is
            given; or `leaves` is given for a type into which colocate looks by itself.
    """
    if (leaves is None) is not (rebuild is None):
        present, absent = ("leaves", "rebuild") if rebuild is None else ("rebuild", "leaves")
        raise ConfigError(f"register_batch({cls.__qualname__}): {present}= needs {absent}=, too: give both, or neither")
    structure = None if leaves is None or rebuild is None else Structure(leaves, rebuild)
    kind = _RegisteredKind(length, split, concat, structure)
    former = kinds.get(cls)
    is_builtin = cls in (tuple, dict, type(None), object) or f"{cls.__module__}.{cls.__qualname__}" in _OWN
    if is_builtin or (former is not None and not isinstance(former, _RegisteredKind)):
        raise ConfigError(
            f"register_batch({cls.__qualname__}): colocate itself says what the rows of this type are; "
            "register a subclass of it, or a type of your own"
        )
    if former is not None and former != kind:
        raise ConfigError(
            f"register_batch({cls.__qualname__}): this type is registered already with other functions; "
            "register it once, in the module that defines it"
        )
    if structure is not None and (
        issubclass(cls, (dict, list, tuple)) or type(find_kind(cls)) not in (_RegisteredKind, type(None))
    ):
        raise ConfigError(
            f"register_batch({cls.__qualname__}, leaves=...): colocate itself looks into values of this type; leave "
            "leaves and rebuild out"
        )
    kinds[cls] = kind
    register_structure(cls, structure)
    clear_caches()
