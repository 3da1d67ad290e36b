"""List the types inside nested values, and report values that contain themselves."""

from __future__ import annotations

import gc
from typing import Any

from colocate.errors import SerializationError


def find_nesting_error(what: str, argument: str | None = None) -> SerializationError:
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


def collect_kinds(value: Any) -> set[type]:
    """Return the types of all objects in nested lists, tuples and dicts.

    This follows the garbage collector's references level by level, so there may be more types than the items have.
    """
    kinds: set[type] = set()
    visited: set[int] = set()
    level = [value]
    while level:
        level_kinds = set(map(type, level))
        kinds |= level_kinds
        if not any(
            issubclass(kind, dict | list | tuple) for kind in level_kinds
        ):  # This is fast even for a list of a million numbers.
            break
        fresh = {id(item): item for item in level if isinstance(item, dict | list | tuple)}
        level = gc.get_referents(*map(fresh.__getitem__, fresh.keys() - visited))
        visited.update(fresh)
    return kinds
