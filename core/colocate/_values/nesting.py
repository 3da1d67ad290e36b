"""How values are nested: an error for one that has no end, and the types of all that lies in one."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from colocate._definitions.structure import named, structure_of
from colocate._values.kinds import is_collection
from colocate._values.plain import PLAIN
from colocate.errors import SerializationError

_DEEP = 100  # levels; whatever walks values has room for more of them
_SHOWN = 4


def no_end(arguments: Mapping[str, Any], what: str) -> SerializationError | None:
    """Return the error for a value that contains itself or is nested too deeply; None when none is so.

    `what` is what the values are sent to, or come from.
    """
    for name, value in arguments.items():
        found = _no_end(value, name)
        if found is not None:
            path, why = found
            return SerializationError(f"{what}: {path} can't be sent: {why}", argument=name, path=path)
    return None


def _no_end(value: Any, name: str) -> tuple[str, str] | None:
    """Return where a value has no end, and words for it."""
    done: dict[int, Any] = {}  # by id(), with what it is of: leaves may be there for as long as this looks at them
    on_way: dict[int, int] = {}  # what contains what is looked at, with its level
    steps: list[str] = [name]
    walk: list[tuple[Any, Iterator[tuple[str, Any]]]] = [(value, _inside(value))]
    on_way[id(value)] = 0
    deepest: tuple[int, str] = 0, ""
    while walk:
        item, parts = walk[-1]
        step, part = next(parts, (None, None))
        if step is None:
            walk.pop()
            steps.pop()
            del on_way[id(item)]
            done[id(item)] = item
            continue
        if type(part) in PLAIN or id(part) in done:
            continue
        level = on_way.get(id(part))
        if level is not None:
            if not all(isinstance(each, dict | list | tuple) or structure_of(type(each)) for each, _ in walk[level:]):
                continue  # an object may know itself
            path = _short([*steps, step])
            there = _short(steps[: level + 1])
            return path, f"it is {there} itself, so there is no end to it. Give it without what leads back"
        steps.append(step)
        walk.append((part, _inside(part)))
        on_way[id(part)] = len(walk) - 1
        if len(walk) > deepest[0]:
            deepest = len(walk), _short(steps)
    levels, path = deepest
    if levels <= _DEEP:
        return None
    return path, f"it is nested {levels} levels deep. Give it flat: a list, an array or a tensor of rows, or bytes"


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        return ((f"[{key!r}]", item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return ((f"[{index}]", item) for index, item in enumerate(value))
    kind: type = type(value)
    if (structure := structure_of(kind)) is not None:
        return named(structure.open(value))
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict) and not isinstance(value, type) and not is_collection(kind):
        return ((f".{key}", item) for key, item in state.items())
    return iter(())


def _short(steps: list[str]) -> str:
    if len(steps) <= 2 * _SHOWN:
        return "".join(steps)
    return f"{''.join(steps[:_SHOWN])}…{steps[-1]}"


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
