"""Rows of values: counting them, taking a value apart along them, putting it together again.

Nothing here changes a value that it was given; parts may share its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from colocate._definitions.structure import structure_of
from colocate._system.by_type import by_type
from colocate._system.numbers import plural
from colocate._values.kinds import Kind, Memo, kind_of
from colocate._values.leaves import Label, check_alike, is_container, leaves, named_leaves, rebuild, take_apart
from colocate._values.leaving import on_one_device
from colocate.errors import DispatchError

Padding = Literal["none", "even"]

_HAVE_ROWS = (
    "what has rows is a tensor (dense or jagged), a NumPy array, a list, a TensorDict, a type given to "
    "colocate.register_batch, and a tuple, dict or other mapping of those"
)


class Deferred:
    """A leaf whose rows are not on the driver: a resident's reference. Dispatches ask its methods for placeholders."""

    __slots__ = ()


@by_type
def is_deferred(kind: type) -> bool:
    """Whether values of this type are `Deferred`."""
    return issubclass(kind, Deferred)


@attrs.frozen
class Beside:
    """Plain rows that are scattered with a resident, the parameter `owner`, of which only workers know the rows."""

    name: str
    rows: int
    owner: str

    def check(self, rows: int) -> None:
        """Raise a `DispatchError` unless the resident has as many rows."""
        same_rows(self.name, self.rows, self.owner, rows)


@attrs.frozen(eq=False)
class Cut:
    """A plain value on its way to all ranks: each takes the rows that lie beside its own part of a resident (`by`)."""

    value: Any
    by: Any
    beside: Beside


def check_sets(what: str, rows: int, of: int, parameter: str | None = None) -> None:
    """Raise a `DispatchError` unless rows are whole sets of those that stay together."""
    if rows % of:
        raise DispatchError(
            f"{what} has {plural(rows, 'row')}, which is no multiple of {of}: Scatter(rows_of={of}) keeps every {of} "
            "rows together",
            parameter=parameter,
        )


def same_rows(first: str, rows: int, other: str, others: int) -> None:
    """Raise a `DispatchError` unless two parameters that are scattered together have as many rows."""
    if rows != others:
        raise DispatchError(
            f"the parameter {other!r} has {plural(others, 'row')} but {first!r} has {rows}: what is scattered together "
            "needs as many rows each",
            parameter=other,
        )


def rows(value: Any, path: str) -> int:
    """Count the rows of a value, in which all leaves have to agree; a `DispatchError` calls the value `path`."""
    total = count_rows(value, path)
    if total is None:
        what = "is None" if value is None else f"({type(value).__name__}) holds nothing but None"
        raise DispatchError(f"{path} {what}, which has no rows; {_HAVE_ROWS}")
    return total


def count_rows(value: Any, path: str) -> int | None:
    """Count as `rows` does, but give None where no leaf has rows that the driver knows: only None and `Deferred`."""
    total: int | None = None
    for leaf in leaves(value):
        cls = type(leaf)
        if is_deferred(cls):
            continue
        kind = kind_of(cls)
        own = None if kind is None else kind.length(leaf)
        if own is None or (total is not None and own != total):
            raise _uneven(value, path)
        total = own
    return total


def _uneven(value: Any, path: str) -> DispatchError:
    """Tell which leaves of a value have no rows, or not as many as another one."""
    named = [(where, leaf) for where, leaf in named_leaves(value, path) if not is_deferred(type(leaf))]
    first, total = named[0][0], _length(named[0][1], named[0][0])
    for where, leaf in named:
        if (other := _length(leaf, where)) != total:
            return DispatchError(
                f"{first} has {plural(total, 'row')} but {where} has {other}: "
                "the parts of one value need as many rows each"
            )
    raise AssertionError(f"{path} has {total} rows")


def _kind(leaf: Any, path: str) -> Kind:
    cls: type = type(leaf)
    kind = kind_of(cls)
    if kind is None:
        raise DispatchError(f"{path} ({cls.__name__}) has no rows; {_HAVE_ROWS}")
    return kind


def _length(leaf: Any, path: str) -> int:
    total = _kind(leaf, path).length(leaf)
    if total is None:
        what = "a strided nested tensor" if getattr(leaf, "is_nested", False) else f"0-d {type(leaf).__name__}"
        raise DispatchError(f"{path} ({what}) has no rows; {_HAVE_ROWS}")
    return total


def each_row(value: Any, path: str) -> list[Any]:
    """Take the rows one by one, as their items: of a list the item itself, of a tensor one with an axis less.

    Of a type that was registered (`register_batch`) each is a batch of one row. Other sequences, as `range`, are lists.
    """
    if isinstance(value, Sequence) and not isinstance(value, (tuple, str, bytes)) and kind_of(type(value)) is None:
        value = list(value)
    count, memo = rows(value, path), Memo()
    return take_apart(value, count, lambda leaf: _kind(leaf, path).items(leaf, memo))


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Take the rows from `start` to before `stop`, cut to those there are."""
    total = count_rows(value, "value") or 0
    start = min(max(start, 0), total)
    stop = min(max(stop, start), total)
    memo = Memo()
    return take_apart(value, 1, lambda leaf: [cut(leaf, start, stop, memo)])[0]


def cut(leaf: Any, start: int, stop: int, memo: Memo) -> Any:
    """Take some rows of a leaf; leaves that are cut with one memo share what they shared before."""
    kind = _kind(leaf, "value")
    return leaf if (start, stop) == (0, kind.length(leaf)) else kind.slice(leaf, start, stop, memo)


def take_rows(value: Any, rows: Sequence[int]) -> Any:
    """Take these rows, in this order."""
    memo = Memo()
    return take_apart(value, 1, lambda leaf: [take(leaf, rows, memo)])[0]


def take(leaf: Any, rows: Sequence[int], memo: Memo) -> Any:
    """Take these rows of a leaf; leaves that are taken from with one memo share what they shared before."""
    return _kind(leaf, "value").take(leaf, rows, memo)


def pad(value: Any, to: int) -> Any:
    """Repeat the last row until there are `to` rows; the value given, which has one at least, stays as it is."""
    total = rows(value, "value")
    return value if total == to else take_apart(value, 1, leaf_splitter([total], to))[0]


def leaf_splitter(sizes: Sequence[int], each: int | None = None) -> Callable[[Any], Sequence[Any]]:
    """Return what splits the leaves of one value, for `take_apart`; with `each`, all parts are padded to so many rows.

    Padding is the leaf's last row, repeated.
    """
    memo = Memo()
    total = sum(sizes)

    def split(leaf: Any) -> Sequence[Any]:
        kind = _kind(leaf, "value")
        parts = [leaf] if len(sizes) == 1 else kind.split(leaf, sizes, memo)
        if each is None or each * len(sizes) == total:
            return parts
        last = leaf if total == 1 else kind.slice(leaf, total - 1, total, memo)
        nothing_real: list[Any] = []  # such parts are all alike, so there is one
        padded: list[Any] = []
        for part, size in zip(parts, sizes, strict=True):
            if size == each:
                padded.append(part)
            elif size:
                padded.append(kind.concat([part, *[last] * (each - size)], memo))
            else:
                nothing_real = nothing_real or [last if each == 1 else kind.concat([last] * each, memo)]
                padded += nothing_real
        return padded

    return split


def concat(parts: Sequence[Any], path: str, label: Label = "part {}".format, memo: Memo | None = None) -> Any:
    """Put one part or more together, one after the other; `label` says what errors call part i."""
    if len(parts) == 1:
        return parts[0]
    if memo is None:
        memo = Memo()
    first = parts[0]
    if first is None or is_container(first):
        check_alike(parts, path, label)
        if isinstance(first, Mapping):
            made = {key: concat([p[key] for p in parts], f"{path}[{key!r}]", label, memo) for key in first}
            return rebuild(first, made)
        if isinstance(first, tuple):
            columns = enumerate(zip(*parts, strict=True))
            return rebuild(first, [concat(items, f"{path}[{index}]", label, memo) for index, items in columns])
        return None
    kind = _kind(first, path)
    for index, part in enumerate(parts):
        cls: type = type(part)
        if kind_of(cls) is not kind:
            kinds = type(first).__name__, "None" if part is None else cls.__name__
            raise DispatchError(
                f"{path}: that of {label(0)} is a {kinds[0]} and that of {label(index)} is {kinds[1]}, "
                "so they can't be joined; make them alike"
            )
        _length(part, path)
    if structure_of(type(first)) is not None:
        parts = on_one_device(parts)  # as those of tensors are
    try:
        return kind.concat(parts, memo)
    except Exception as error:
        raise DispatchError(
            f"{path}: {len(parts)} parts ({type(first).__name__}) can't be joined: {error}; make them alike but "
            "for their rows (pad them to one length, or give jagged tensors or lists)"
        ) from error
