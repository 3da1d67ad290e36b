"""Nested values: walking them, taking them apart and rebuilding them with their types kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from colocate._system.by_type import by_type
from colocate._values.leaves import kind_of
from colocate.errors import DispatchError

PLAIN = frozenset({int, float, str, bool, bytes, type(None)})
"""Types of values in which there is nothing else: what long lists are mostly made of."""

Label = Callable[[int], str]
"""What to call one of several values in an error."""


def is_container(value: Any) -> bool:
    """Whether the value is a tuple or mapping of values, and not itself a leaf with rows."""
    kind: type = type(value)
    return _has_parts(kind) and kind_of(kind) is None


@by_type
def _has_parts(kind: type) -> bool:
    return issubclass(kind, (Mapping, tuple))


def leaves(value: Any) -> list[Any]:
    """Every leaf but None, in order."""
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
    """Every leaf but None with its path, in order."""
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
    """The value with each leaf of its nested lists, tuples and dicts replaced by `leaf(it)`.

    What nothing changed in is the same object as before.

    Args:
        value: The value.
        leaf: What becomes of each leaf.
        matters: Whether `leaf` may change a leaf of this type; it is asked for no other one. Long lists of what doesn't
            matter are then cheap.
        key: Looks at each key that is no string. Keys stay as they are.
    """
    if isinstance(value, dict):
        if key is not None:
            for name in value:
                if type(name) is not str:
                    key(name)
        changed = {name: new for name, old in value.items() if (new := map_leaves(old, leaf, matters, key)) is not old}
        return rebuild_dict(value, changed) if changed else value
    if isinstance(value, (list, tuple)):
        if matters is not None and not may_hold(value, matters):
            return value
        items = [map_leaves(item, leaf, matters, key) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return rebuild_tuple(value, items) if isinstance(value, tuple) else items
    return leaf(value) if matters is None or matters(type(value)) else value


def may_hold(items: Iterable[Any], matters: Callable[[type], bool]) -> bool:
    """Whether something that matters may be among the items, or inside one: decided by their types alone."""
    return any(issubclass(kind, (dict, list, tuple)) or matters(kind) for kind in set(map(type, items)))


def take_apart(value: Any, count: int, leaf: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """`count` values of the structure of this one, where `leaf` gives the parts of each leaf."""
    if value is None:
        return [None] * count
    if not is_container(value):
        return list(leaf(value))
    if not value:
        return [value] * count
    if not isinstance(value, tuple):
        columns = [take_apart(item, count, leaf) for item in value.values()]
        return [rebuild_dict(value, dict(zip(value, items, strict=True))) for items in zip(*columns, strict=True)]
    return [rebuild_tuple(value, items) for items in zip(*(take_apart(i, count, leaf) for i in value), strict=True)]


def replaced(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value with `leaf(it)` in place of each of its leaves but None; what `take_apart` gives for one part."""
    if not is_container(value):
        return None if value is None else leaf(value)
    if not isinstance(value, tuple):
        return rebuild_dict(value, {key: replaced(item, leaf) for key, item in value.items()})
    return rebuild_tuple(value, [replaced(item, leaf) for item in value])


def rebuild_dict(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type and order with these items in place of its own.

    One that is no dict, such as a `UserDict` or a tokenizer's `BatchEncoding`, is made by its class of a dict: what it
    has besides its items may be of its rows.
    """
    if type(value) is dict:
        return items if len(items) == len(value) else {**value, **items}
    if not isinstance(value, dict):
        if all(items.get(key) is item for key, item in value.items()):
            return value
        made: Any = type(value)
        try:
            return made({**value, **items})
        except Exception as error:
            raise _cannot_be_made(value, error, "Make it of a dict alone, or pass that") from error
    new = copy.copy(value)  # the one way that keeps what subclasses hold besides their items
    for key, item in items.items():
        new[key] = item
    return new


def _cannot_be_made(value: Any, error: Exception, instead: str) -> DispatchError:
    return DispatchError(f"no {type(value).__qualname__} can be made of other items: {error}. {instead}")


def rebuild_tuple(value: tuple[Any, ...], items: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple of the same type with these items, which are as many."""
    if type(value) is tuple:
        return tuple(items)
    make: Callable[[Iterable[Any]], tuple[Any, ...]] = getattr(type(value), "_make", type(value))
    try:
        return make(items)
    except Exception as error:
        instead = "Give the class a classmethod _make(items), as a named tuple has it, or pass a plain tuple"
        raise _cannot_be_made(value, error, instead) from error


def check_alike(values: Sequence[Any], path: str, label: Label) -> None:
    """Check that all values are None, or mappings with equal keys, or sequences of equal length as the first is.

    Raises:
        DispatchError: They aren't.
    """
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
