"""Count, split and join the rows of values.

No given value is changed; parts may share its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from colocate._definitions.structure import structure_of
from colocate._system.by_type import by_type
from colocate._system.numbers import format_count
from colocate._values.kinds import Kind, Memo, find_kind
from colocate._values.leaves import (
    Label,
    check_alike,
    is_container,
    iter_named_leaves,
    list_leaves,
    rebuild,
    split_structure,
)
from colocate._values.leaving import move_to_one_device
from colocate.errors import DispatchError

Padding = Literal["none", "even"]

_HAVE_ROWS = (
    "what has rows is a tensor (dense or jagged), a NumPy array, a list, a TensorDict, a type given to "
    "colocate.register_batch, and a tuple, dict or other mapping of those"
)


class Deferred:
    """Base class of references to residents: leaves with rows that are on workers, not on the driver.

    A dispatch gets placeholders for the leaf from the methods of a subclass.
    """

    __slots__ = ()


@by_type
def is_deferred(kind: type) -> bool:
    return issubclass(kind, Deferred)


@attrs.frozen
class AlignedRows:
    """A check by the workers that a plain parameter `name` has as many rows as a resident (parameter `owner`)."""

    name: str
    rows: int
    owner: str

    def check_rows(self, rows: int) -> None:
        """Compare the resident's number of rows with the plain parameter's number.

        Raises:
            DispatchError: The numbers differ.
        """
        check_same_rows(self.name, self.rows, self.owner, rows)


@attrs.frozen(eq=False)
class CutValue:
    """A plain value sent to all ranks. Each rank takes the rows that match a part of a resident (`by`)."""

    value: Any
    by: Any
    aligned_rows: AlignedRows


def check_sets(what: str, rows: int, of: int, parameter: str | None = None) -> None:
    """Raise a `DispatchError` unless the number of rows is a multiple of `of`."""
    if rows % of:
        raise DispatchError(
            f"{what} has {format_count(rows, 'row')}, which is no multiple of {of}: Scatter(rows_of={of}) keeps "
            f"every {of} "
            "rows together",
            parameter=parameter,
        )


def check_same_rows(first: str, rows: int, other: str, others: int) -> None:
    """Raise a `DispatchError` unless two parameters that are scattered together have equal numbers of rows."""
    if rows != others:
        raise DispatchError(
            f"the parameter {other!r} has {format_count(others, 'row')} but {first!r} has {rows}: what is "
            "scattered together "
            "needs as many rows each",
            parameter=other,
        )


def get_row_count(value: Any, path: str) -> int:
    """Return the number of rows of a value, in which all leaves must have equally many rows.

    Raises:
        DispatchError: Leaves differ, or have no rows; `path` is the value's name in the message.
    """
    total = count_rows(value, path)
    if total is None:
        reason = "is None" if value is None else f"({type(value).__name__}) holds nothing but None"
        raise DispatchError(f"{path} {reason}, which has no rows; {_HAVE_ROWS}")
    return total


def count_rows(value: Any, path: str) -> int | None:
    """Count rows like `get_row_count`, but return None if all leaves of the value are None or `Deferred`."""
    total: int | None = None
    for leaf in list_leaves(value):
        cls = type(leaf)
        if is_deferred(cls):
            continue
        kind = find_kind(cls)
        count = None if kind is None else kind.length(leaf)
        if count is None or (total is not None and count != total):
            raise _make_uneven_error(value, path)
        total = count
    return total


def _make_uneven_error(value: Any, path: str) -> DispatchError:
    named = [(where, leaf) for where, leaf in iter_named_leaves(value, path) if not is_deferred(type(leaf))]
    first, total = named[0][0], _get_length(named[0][1], named[0][0])
    for where, leaf in named:
        if (other := _get_length(leaf, where)) != total:
            return DispatchError(
                f"{first} has {format_count(total, 'row')} but {where} has {other}: "
                "the parts of one value need as many rows each"
            )
    raise AssertionError(f"{path} has {total} rows")


def _get_kind(leaf: Any, path: str) -> Kind:
    cls: type = type(leaf)
    kind = find_kind(cls)
    if kind is None:
        raise DispatchError(f"{path} ({cls.__name__}) has no rows; {_HAVE_ROWS}")
    return kind


def _get_length(leaf: Any, path: str) -> int:
    total = _get_kind(leaf, path).length(leaf)
    if total is None:
        description = "a strided nested tensor" if getattr(leaf, "is_nested", False) else f"0-d {type(leaf).__name__}"
        raise DispatchError(f"{path} ({description}) has no rows; {_HAVE_ROWS}")
    return total


def split_rows(value: Any, path: str) -> list[Any]:
    """Return the individual rows of a value: the items of a list, or a tensor's slices, each with one axis less.

    The row of a type in `register_batch` is a batch of one row. Other sequences, such as `range`, count as lists.
    """
    if isinstance(value, Sequence) and not isinstance(value, (tuple, str, bytes)) and find_kind(type(value)) is None:
        value = list(value)
    count, memo = get_row_count(value, path), Memo()
    return split_structure(value, count, lambda leaf: _get_kind(leaf, path).items(leaf, memo))


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Return the rows of a value from `start` to before `stop`, clipped to the existing rows."""
    total = count_rows(value, "value") or 0
    start = min(max(start, 0), total)
    stop = min(max(stop, start), total)
    memo = Memo()
    return split_structure(value, 1, lambda leaf: [cut_leaf(leaf, start, stop, memo)])[0]


def cut_leaf(leaf: Any, start: int, stop: int, memo: Memo) -> Any:
    """Return the rows of a leaf from `start` to before `stop`. The memo keeps jagged offsets shared among leaves."""
    kind = _get_kind(leaf, "value")
    return leaf if (start, stop) == (0, kind.length(leaf)) else kind.slice(leaf, start, stop, memo)


def take_rows(value: Any, rows: Sequence[int]) -> Any:
    """Return the rows of a value at these indices, in the given order."""
    memo = Memo()
    return split_structure(value, 1, lambda leaf: [take_leaf(leaf, rows, memo)])[0]


def take_leaf(leaf: Any, rows: Sequence[int], memo: Memo) -> Any:
    """Return the rows of a leaf at these indices. The memo keeps jagged offsets shared among leaves."""
    return _get_kind(leaf, "value").take_rows(leaf, rows, memo)


def pad_rows(value: Any, to: int) -> Any:
    """Return a value padded to `to` rows with copies of the last row. The value needs at least one row."""
    total = get_row_count(value, "value")
    return value if total == to else split_structure(value, 1, create_leaf_splitter([total], to))[0]


def create_leaf_splitter(sizes: Sequence[int], each: int | None = None) -> Callable[[Any], Sequence[Any]]:
    """Return a function that splits a leaf into parts of these sizes; with `each`, parts are padded to `each` rows.

    Padding repeats the leaf's last row. The function is for `split_structure`.
    """
    memo = Memo()
    total = sum(sizes)

    def split(leaf: Any) -> Sequence[Any]:
        kind = _get_kind(leaf, "value")
        parts = [leaf] if len(sizes) == 1 else kind.split(leaf, sizes, memo)
        if each is None or each * len(sizes) == total:
            return parts
        last = leaf if total == 1 else kind.slice(leaf, total - 1, total, memo)
        nothing_real: list[Any] = []  # Ranks that get only padding share this one part.
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
    """Join the rows of parts in order. `label` returns the name of part i for errors."""
    if len(parts) == 1:
        return parts[0]
    if memo is None:
        memo = Memo()
    first = parts[0]
    if first is None or is_container(first):
        check_alike(parts, path, label)
        if isinstance(first, Mapping):
            joined = {key: concat([p[key] for p in parts], f"{path}[{key!r}]", label, memo) for key in first}
            return rebuild(first, joined)
        if isinstance(first, tuple):
            columns = enumerate(zip(*parts, strict=True))
            return rebuild(first, [concat(items, f"{path}[{index}]", label, memo) for index, items in columns])
        return None
    kind = _get_kind(first, path)
    for index, part in enumerate(parts):
        cls: type = type(part)
        if find_kind(cls) is not kind:
            kinds = type(first).__name__, "None" if part is None else cls.__name__
            raise DispatchError(
                f"{path}: that of {label(0)} is a {kinds[0]} and that of {label(index)} is {kinds[1]}, "
                "so they can't be joined; make them alike"
            )
        _get_length(part, path)
    if structure_of(type(first)) is not None:
        parts = move_to_one_device(parts)  # For plain tensors, `kind.concat` does this.
    try:
        return kind.concat(parts, memo)
    except Exception as error:
        raise DispatchError(
            f"{path}: {len(parts)} parts ({type(first).__name__}) can't be joined: {error}; make them alike but "
            "for their rows (pad them to one length, or give jagged tensors or lists)"
        ) from error
