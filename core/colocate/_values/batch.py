"""Rows of values: counting them, taking a value apart along them, putting it together again.

A value is a leaf with rows (see `leaves.py`), a tuple or dict of values, or None, which has no rows and goes everywhere
as it is. Nothing here changes a value that it was given; parts may share its memory.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import attrs

from colocate._system.by_type import by_type
from colocate._system.numbers import plural
from colocate._values.beside import Beside
from colocate._values.leaves import Kind, Memo, Registered, kind_of, register
from colocate._values.tree import (
    PLAIN,
    Label,
    check_alike,
    is_container,
    leaves,
    may_hold,
    named_leaves,
    rebuild_dict,
    rebuild_tuple,
    replaced,
    take_apart,
)
from colocate._values.tree import map_leaves as map_leaves  # of a piece with what is here
from colocate.errors import DispatchError

B = TypeVar("B")

Padding = Literal["none", "even"]

_HAVE_ROWS = (
    "what has rows is a tensor (dense or jagged), a NumPy array, a list, a TensorDict, a type given to "
    "colocate.register_batch, and a tuple, dict or other mapping of those"
)


class Deferred(abc.ABC):
    """A leaf whose rows are not on the driver: a resident's reference.

    What `part`, `slice` and `whole` return are placeholders that the worker turns into values.
    """

    @abc.abstractmethod
    def sizes(self, axis: str, mesh: str | None, count: int, of: int = 1) -> list[int]:
        """The rows of each part when taken apart into `count` parts along that axis; blocks until they are known.

        `of` is, here and below, how many rows stay together.
        """

    @abc.abstractmethod
    def part(self, index: int, count: int, axis: str, mesh: str | None, padding: Padding, of: int = 1) -> Any:
        """Part `index` of `count`: the producer's own partition where it matches, otherwise `share` of the value.

        With the padding "even" it is `share(value, index, count, "even")` whatever the producer's partition.
        """

    def own(self, axis: str, mesh: str | None, count: int, of: int = 1) -> Any | None:
        """One placeholder that serves for all these parts, because each rank has its own already; None if it hasn't."""
        return None

    @property
    def known(self) -> bool:
        """Whether its rows are known now, so that `sizes` doesn't block."""
        return True

    def share(self, index: int, count: int, padding: Padding, beside: Beside, of: int = 1) -> Any:
        """Part `index` of `count` even ones, whatever the producer's partition; its rank compares its rows."""
        raise NotImplementedError(f"{type(self).__name__} is always known")

    def items(self, count: int, parameter: str) -> Sequence[Any] | None:
        """Placeholders for the items of a list of so many; None where only the value itself tells."""
        return None

    @abc.abstractmethod
    def slice(self, start: int, stop: int) -> Any:
        """Exactly these rows."""

    @abc.abstractmethod
    def whole(self) -> Any:
        """The whole value."""

    @abc.abstractmethod
    def fetch(self) -> Any:
        """The value itself, collected on the driver; blocks."""


def rows(value: Any, path: str) -> int:
    """The number of rows of a value, in which all leaves have to agree.

    Args:
        value: What to count.
        path: What to call the value in an error.

    Raises:
        DispatchError: A leaf has no rows, leaves disagree, or there is no leaf.
    """
    total = count_rows(value, path)
    if total is None:
        what = "is None" if value is None else f"({type(value).__name__}) holds nothing but None"
        raise DispatchError(f"{path} {what}, which has no rows; {_HAVE_ROWS}")
    return total


def count_rows(value: Any, path: str) -> int | None:
    """As `rows`, but None where no leaf has rows that the driver knows: only None, and `Deferred` ones."""
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
    """Which leaves of a value have no rows, or not as many as another one."""
    named = [(where, leaf) for where, leaf in named_leaves(value, path) if not is_deferred(type(leaf))]
    first, total = named[0][0], _length(named[0][1], named[0][0])
    for where, leaf in named:
        if (other := _length(leaf, where)) != total:
            return DispatchError(
                f"{first} has {plural(total, 'row')} but {where} has {other}: "
                "the parts of one value need as many rows each"
            )
    raise AssertionError(f"{path} has {total} rows")


def split(value: Any, sizes: Sequence[int], path: str) -> list[Any]:
    """Contiguous parts with these numbers of rows; `concat` is the inverse.

    Raises:
        DispatchError: A leaf has no rows, leaves disagree, or the sizes don't add up to the rows.
    """
    total = count_rows(value, path)
    if total is not None and (sum(sizes) != total or min(sizes, default=0) < 0):
        raise DispatchError(f"{path} has {total} rows, which parts of {list(sizes)} rows don't add up to")
    return take_apart(value, len(sizes), leaf_splitter(sizes))


def slice_rows(value: Any, start: int, stop: int, path: str = "value") -> Any:
    """The rows from `start` to before `stop`, cut to those there are."""
    total = count_rows(value, path) or 0
    start = min(max(start, 0), total)
    stop = min(max(stop, start), total)
    memo = Memo()

    def cut(leaf: Any) -> Any:
        return leaf if (start, stop) == (0, total) else _kind(leaf, path).slice(leaf, start, stop, memo)

    return replaced(value, cut)


def cut(leaf: Any, start: int, stop: int, memo: Memo) -> Any:
    """Some rows of a leaf; leaves that are cut with one memo share what they shared before."""
    kind = _kind(leaf, "value")
    return leaf if (start, stop) == (0, kind.length(leaf)) else kind.slice(leaf, start, stop, memo)


def pad(value: Any, to: int, path: str = "value") -> Any:
    """The value with its last row repeated until there are `to` rows; the value given stays as it is.

    Raises:
        DispatchError: There are no rows, or more than `to`.
    """
    total = rows(value, path)
    if total > to:
        raise DispatchError(f"{path} has {total} rows, more than the {to} it should be padded to")
    if total == to:
        return value
    if total == 0:
        raise DispatchError(f"{path} has 0 rows, so there is no last row to pad with to {to}; give it a row at least")
    split = leaf_splitter([total], to)
    return replaced(value, lambda leaf: split(leaf)[0])


def even_sizes(total: int, count: int, of: int = 1) -> list[int]:
    """The rows of `count` parts that differ by one set of `of` rows at most, the larger ones first."""
    each, more = divmod(total // of, count)
    return [(each + 1) * of] * more + [each * of] * (count - more)


def padded_sizes(total: int, count: int) -> tuple[int, list[int]]:
    """The rows of each of `count` equal parts, and how many of them are real: the padding is at the very end."""
    each = -(-total // count)
    return each, [min(max(total - index * each, 0), each) for index in range(count)]


def share(value: Any, index: int, count: int, padding: Padding = "none", path: str = "value") -> tuple[Any, int]:
    """Part `index` of `count` even parts and how many of its rows are real; what `split` over even sizes gives.

    Raises:
        DispatchError: The value has no rows, or there is nothing to pad with.
    """
    total = rows(value, path)
    if padding == "none":
        each, more = divmod(total, count)
        start = index * each + min(index, more)
        stop = start + each + (index < more)
        return slice_rows(value, start, stop, path), stop - start
    each = -(-total // count)
    start, stop = min(index * each, total), min((index + 1) * each, total)
    source = slice_rows(value, start, stop, path) if stop > start else slice_rows(value, total - 1, total, path)
    return pad(source, each, path), stop - start


def concat(parts: Sequence[Any], path: str, label: Label = "part {}".format) -> Any:
    """The parts one after the other, the inverse of `split`.

    Args:
        parts: The parts, at least one.
        path: What to call the whole in an error.
        label: What to call part i in an error.

    Raises:
        DispatchError: The parts differ in structure, a leaf has no rows, or leaves can't be joined.
    """
    if not parts:
        raise DispatchError(f"{path}: there are no parts to join")
    return parts[0] if len(parts) == 1 else _Joiner(label).join(parts, path)


def register_batch(
    cls: type[B],
    *,
    length: Callable[[B], int],
    split: Callable[[B, Sequence[int]], Sequence[B]],
    concat: Callable[[Sequence[B]], B],
) -> None:
    """Teach colocate the rows of a type and its subclasses, so that it can be scattered and joined.

    Register in the module that defines the type: workers import it too.

    Args:
        cls: The type.
        length: The number of rows of a value.
        split: `split(value, sizes)` gives contiguous parts with these numbers of rows, leaving the value as it is.
        concat: The inverse: one value from parts.

    Raises:
        ConfigError: The type is known already, unless it was registered with these very functions.
    """
    register(cls, Registered(length, split, concat))


def find_deferred(value: Any) -> list[Deferred]:
    """Every `Deferred` in nested lists, tuples and dicts, in order, each one once."""
    if type(value) in PLAIN or (type(value) is dict and PLAIN.issuperset(map(type, value.values()))):
        return []  # as the arguments of many a call
    found: list[Deferred] = []
    seen: set[int] = set()  # also what ends the walk through a list that contains itself
    stack = [value]
    while stack:
        item = stack.pop()
        if type(item) in PLAIN:
            continue
        if isinstance(item, (list, tuple, dict)):
            items = item.values() if isinstance(item, dict) else item
            if not PLAIN.issuperset(map(type, items)) and id(item) not in seen and may_hold(items, is_deferred):
                seen.add(id(item))
                stack.extend(reversed(items))
        elif isinstance(item, Deferred) and id(item) not in seen:
            seen.add(id(item))
            found.append(item)
    return found


@by_type
def is_deferred(kind: type) -> bool:
    """Whether values of this type are `Deferred`."""
    return issubclass(kind, Deferred)


def leaf_deferred(value: Any) -> list[Deferred]:
    """Every `Deferred` that stands where `rows` looks for a leaf: in tuples and dicts, but not as an item of a list."""
    return [leaf for leaf in leaves(value) if is_deferred(type(leaf))]


def resolve(value: Any, leaf: Callable[[Deferred], Any]) -> Any:
    """The value with every `Deferred` in it replaced by `leaf(it)`; without one the value itself, and cheaply."""
    if not find_deferred(value):
        return value
    return map_leaves(value, lambda item: leaf(item) if isinstance(item, Deferred) else item)


def leaf_splitter(sizes: Sequence[int], each: int | None = None) -> Callable[[Any], Sequence[Any]]:
    """What splits the leaves of one value, for `take_apart`; with `each`, all parts are padded to so many rows."""
    memo = Memo()

    def cut(leaf: Any) -> Sequence[Any]:
        kind = _kind(leaf, "value")
        parts = [leaf] if len(sizes) == 1 else kind.split(leaf, sizes, memo)
        if each is None or each * len(sizes) == sum(sizes):
            return parts
        return _pad_parts(leaf, parts, sizes, each, kind, memo)

    return cut


def _pad_parts(
    leaf: Any, parts: Sequence[Any], sizes: Sequence[int], each: int, kind: Kind, memo: Memo
) -> Sequence[Any]:
    """The parts with the leaf's last row repeated in those that have fewer than `each` rows."""
    total = sum(sizes)
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


def _kind(leaf: Any, path: str) -> Kind:
    cls: type = type(leaf)
    kind = kind_of(cls)
    if kind is None:
        raise DispatchError(f"{path} ({type(leaf).__name__}) has no rows; {_HAVE_ROWS}")
    return kind


def _length(leaf: Any, path: str) -> int:
    total = _kind(leaf, path).length(leaf)
    if total is None:
        what = "a strided nested tensor" if getattr(leaf, "is_nested", False) else f"0-d {type(leaf).__name__}"
        raise DispatchError(f"{path} ({what}) has no rows; {_HAVE_ROWS}")
    return total


@attrs.frozen
class _Joiner:
    """One `concat`."""

    label: Label
    memo: Memo = attrs.field(factory=Memo)

    def join(self, parts: Sequence[Any], path: str) -> Any:
        first = parts[0]
        if first is not None and not is_container(first):
            return self._leaves(parts, path)
        check_alike(parts, path, self.label)
        if isinstance(first, Mapping):
            return rebuild_dict(first, {key: self.join([p[key] for p in parts], f"{path}[{key!r}]") for key in first})
        if isinstance(first, tuple):
            columns = enumerate(zip(*parts, strict=True))
            return rebuild_tuple(first, [self.join(items, f"{path}[{index}]") for index, items in columns])
        return None

    def _leaves(self, parts: Sequence[Any], path: str) -> Any:
        kind = _kind(parts[0], path)
        for index, part in enumerate(parts):
            cls: type = type(part)
            if kind_of(cls) is not kind:
                kinds = type(parts[0]).__name__, "None" if part is None else type(part).__name__
                raise DispatchError(
                    f"{path}: that of {self.label(0)} is a {kinds[0]} and that of {self.label(index)} is {kinds[1]}, "
                    "so they can't be joined; make them alike"
                )
            _length(part, path)
        try:
            return kind.concat(parts, self.memo)
        except Exception as error:
            raise DispatchError(
                f"{path}: {len(parts)} parts ({type(parts[0]).__name__}) can't be joined: {error}; make them alike but "
                "for their rows (pad them to one length, or give jagged tensors or lists)"
            ) from error
