"""Handle nested values: an error for endless ones, and the types of all contents."""

from __future__ import annotations

import gc
from typing import Any

from colocate.errors import SerializationError


def no_end(what: str, argument: str | None = None) -> SerializationError:
    """Return the error for a value that contains itself or is nested too deeply.

    Args:
        what: The destination or source of the value.
        argument: The argument's name, if known.
    """
    return SerializationError(
        f"{what}: {argument or 'an argument'} can't be sent: it contains itself, or is nested too deeply. Give it "
        "flat: a list, an array or a tensor of rows, or bytes",
        argument=argument,
        path=argument,
    )


def kinds_inside(value: Any) -> set[type]:
    """Return the types of all objects in nested lists, tuples and dicts.

    The garbage collector's references are followed, level by level, so there may be more types than those of the items.
    """
    kinds: set[type] = set()
    visited: set[int] = set()
    level = [value]
    while level:
        level_kinds = set(map(type, level))
        kinds |= level_kinds
        if not any(
            issubclass(kind, dict | list | tuple) for kind in level_kinds
        ):  # fast for a list of a million numbers
            break
        fresh = {id(item): item for item in level if isinstance(item, dict | list | tuple)}
        level = gc.get_referents(*map(fresh.__getitem__, fresh.keys() - visited))
        visited.update(fresh)
    return kinds
