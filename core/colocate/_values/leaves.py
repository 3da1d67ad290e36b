"""Walk the leaves of values with rows, and build values from new leaves.

A value is a leaf with rows (`kinds`), a tuple or mapping of values, or None.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from colocate._system.by_type import by_type
from colocate._values.kinds import find_kind
from colocate.errors import DispatchError

Label = Callable[[int], str]
"""Returns the name of value i for errors."""


def is_container(value: Any) -> bool:
    """Return whether a value is a tuple or mapping of values, and not itself a leaf with rows."""
    return _is_container(type(value))


@by_type
def _is_container(kind: type) -> bool:
    return issubclass(kind, (Mapping, tuple)) and find_kind(kind) is None


def list_leaves(value: Any) -> list[Any]:
    if not is_container(value):
        return [] if value is None else [value]
    result = []
    for item in value if isinstance(value, tuple) else value.values():
        if is_container(item):
            result += list_leaves(item)
        elif item is not None:
            result.append(item)
    return result


def iter_named_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all leaves of a value except None, each with a path, in order."""
    if value is None:
        return
    if not is_container(value):
        yield path, value
        return
    for key, item in enumerate(value) if isinstance(value, tuple) else value.items():
        yield from iter_named_leaves(item, f"{path}[{key!r}]")


def map_leaves(
    value: Any,
    leaf: Callable[[Any], Any],
    matters: Callable[[type], bool] | None = None,
) -> Any:
    """Replace each leaf of nested lists, tuples and dicts by the result of `leaf`. Unchanged parts aren't copied.

    With `matters`, only leaves of these types are replaced, and long lists of other types are cheap.
    """
    if isinstance(value, dict):
        changed = {name: new for name, old in value.items() if (new := map_leaves(old, leaf, matters)) is not old}
        return rebuild(value, changed) if changed else value
    if isinstance(value, (list, tuple)):
        if matters is not None:
            for kind in set(map(type, value)):
                if issubclass(kind, (dict, list, tuple)) or matters(kind):
                    break
            else:
                return value
        items = [map_leaves(item, leaf, matters) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return rebuild(value, items) if isinstance(value, tuple) else items
    return leaf(value) if matters is None or matters(type(value)) else value


def split_structure(value: Any, count: int, leaf: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """Split a value into `count` values of the same structure, by splitting each leaf with `leaf`."""
    if value is None:
        return [None] * count
    if not is_container(value):
        return list(leaf(value))
    if not value:
        return [value] * count
    if not isinstance(value, tuple):
        columns = [split_structure(item, count, leaf) for item in value.values()]
        return [rebuild(value, dict(zip(value, items, strict=True))) for items in zip(*columns, strict=True)]
    return [rebuild(value, items) for items in zip(*(split_structure(i, count, leaf) for i in value), strict=True)]


def rebuild(value: Any, items: Any) -> Any:
    """Build a mapping or tuple of the same type and order with new items. A tuple needs all items.

    A mapping other than a dict, such as a `UserDict` or a tokenizer's `BatchEncoding`, is built by its class from a
    dict, because further attributes may belong to the old rows.
    """
    kind = type(value)
    if kind is dict:
        return items if len(items) == len(value) else {**value, **items}
    if kind is tuple:
        return tuple(items)
    if isinstance(value, dict):
        new = copy.copy(value)  # A copy keeps further attributes of a subclass.
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
    """Compare the structure of all values with the structure of the first value.

    Raises:
        DispatchError: Some are None and others not, or keys or lengths differ.
    """
    first = values[0]
    for index, value in enumerate(values):
        if (value is None) is not (first is None):
            none_index, value_index = (index, 0) if value is None else (0, index)
            raise DispatchError(f"{path}: that of {label(none_index)} is None and that of {label(value_index)} is not")
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
