"""How values are nested: an error for one that has no end, and the types of all that lies in one."""

from __future__ import annotations

import gc
from typing import Any

from colocate.errors import SerializationError


def no_end(what: str, argument: str | None = None) -> SerializationError:
    """Return the error for a value that contains itself or is nested too deeply, which Python has found.

    Args:
        what: What the value is sent to, or comes from.
        argument: Its name, where that is known.
    """
    return SerializationError(
        f"{what}: {argument or 'an argument'} can't be sent: it contains itself, or is nested too deeply. Give it "
        "flat: a list, an array or a tensor of rows, or bytes",
        argument=argument,
        path=argument,
    )


def kinds_inside(value: Any) -> set[type]:
    """Return the types of all that lies in nested lists, tuples and dicts.

    The interpreter's own references are followed, a level at a time: there may be more types than those of the items.
    """
    kinds: set[type] = set()
    seen: set[int] = set()
    level = [value]
    while level:
        found = set(map(type, level))
        kinds |= found
        if not any(issubclass(kind, dict | list | tuple) for kind in found):  # soon told of a million numbers
            break
        fresh = {id(item): item for item in level if isinstance(item, dict | list | tuple)}
        level = gc.get_referents(*map(fresh.__getitem__, fresh.keys() - seen))
        seen.update(fresh)
    return kinds
