"""What is wrong with how a value is nested: it has no end, or a resident lies where none is looked for."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from colocate._values import is_collection
from colocate.errors import SerializationError

_DEEP = 100  # levels; whatever walks values has room for more of them
_SHOWN = 4
_PLAIN = frozenset({int, float, str, bool, bytes, type(None)})

Step: TypeAlias = "tuple[Step | None, str]"
"""How a part of a value is reached: from where, and how from there."""


def no_end(arguments: Mapping[str, Any], what: str) -> SerializationError | None:
    """The error for a value that can't be walked to its end, since it contains itself or is nested too deeply.

    Args:
        arguments: The values by name.
        what: What they are sent to, or come from.

    Returns:
        The error; None when none of them is so.
    """
    for name, value in arguments.items():
        found = _no_end(value, name)
        if found is not None:
            path, why = found
            return SerializationError(f"{what}: {path} can't be sent: {why}", argument=name, path=path)
    return None


def _no_end(value: Any, name: str) -> tuple[str, str] | None:
    """Path and words."""
    done: set[int] = set()
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
            done.add(id(item))
            continue
        if type(part) in _PLAIN or id(part) in done:
            continue
        level = on_way.get(id(part))
        if level is not None:
            if any(not _is_plain(each) for each, _ in walk[level:]):
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
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict) and not isinstance(value, type) and not is_collection(kind):
        return ((f".{key}", item) for key, item in state.items())
    return iter(())


def _is_plain(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _short(steps: list[str]) -> str:
    if len(steps) <= 2 * _SHOWN:
        return "".join(steps)
    return f"{''.join(steps[:_SHOWN])}…{steps[-1]}"


def has_fields(kind: type) -> bool:
    """Whether values of this type are sets, or of a class that declares its fields."""
    return _fields(kind) is not None


def hides(value: Any, matters: Callable[[type], bool]) -> bool:
    """Whether something that matters is in a value of which `has_fields` is true, or in the key of a dict."""
    return _hidden(value, "", matters, type(value).__qualname__) is not None


def refuse_hidden(arguments: Mapping[str, Any], what: str, matters: Callable[[type], bool]) -> None:
    """Refuse a resident (or what else `matters`) where nothing replaces it by its value.

    That is everywhere but in lists, tuples and the values of dicts: in sets, keys, and the fields of objects of classes
    that declare them.

    Raises:
        SerializationError: There is one.
    """
    for name, value in arguments.items():
        if (found := _hidden(value, name, matters, "")) is not None:
            way, culprit, holder = found
            path = _path(way)
            raise SerializationError(
                f"{what}: {path} can't be sent: it is {culprit!r}, inside a {holder}, where nothing puts its value in "
                "its place. Residents are found in lists, tuples and the values of dicts: pass it so, or as an "
                "argument of its own",
                argument=name,
                path=path,
            )


def refuse_any(
    arguments: Mapping[str, Any], what: str, matters: Callable[[type], bool], instead: Callable[[Any], str]
) -> None:
    """Refuse what `matters` wherever it is: nothing in these arguments is replaced by a value.

    Args:
        arguments: The values by name.
        what: What they are sent to.
        matters: Whether values of a type are refused.
        instead: What to do in place of sending such a value, as a sentence.

    Raises:
        SerializationError: There is one.
    """
    for name, value in arguments.items():
        if (found := _hidden(value, name, matters, what)) is not None:
            way, culprit, _ = found
            path = _path(way)
            raise SerializationError(
                f"{what}: {path} can't be sent: it is {culprit!r}, which lives on the driver. {instead(culprit)}",
                argument=name,
                path=path,
            )


def _hidden(value: Any, name: str, matters: Callable[[type], bool], holder: str) -> tuple[Step, Any, str] | None:
    """How it is reached, it, and what kind of thing holds it."""
    seen: set[int] = set()
    stack: list[tuple[Any, Step, str]] = [(value, (None, name), holder)]
    while stack:
        item, way, holder = stack.pop()
        kind: type = type(item)
        if matters(kind):
            if holder:
                return way, item, holder
            continue
        if kind in _PLAIN or id(item) in seen:
            continue
        seen.add(id(item))
        # Long lists are mostly of plain items, which aren't worth the words of their way.
        if isinstance(item, dict):
            stack += [
                (key, (way, f".keys()[{index}]"), "dict's key")
                for index, key in enumerate(item)
                if type(key) not in _PLAIN
            ]
            stack += [(each, (way, f"[{key!r}]"), holder) for key, each in item.items() if type(each) not in _PLAIN]
        elif isinstance(item, list | tuple):
            stack += [
                (each, (way, f"[{index}]"), holder) for index, each in enumerate(item) if type(each) not in _PLAIN
            ]
        elif (fields := _fields(kind)) is not None:
            stack += [(each, (way, step), kind.__qualname__) for step, each in fields(item)]
    return None


def _path(way: Step | None) -> str:
    steps: list[str] = []
    while way is not None:
        way, step = way
        steps.append(step)
    return "".join(reversed(steps))


@functools.lru_cache(maxsize=1024)
def _fields(kind: type) -> Callable[[Any], Iterable[tuple[str, Any]]] | None:
    """What gives the items or fields of values of this type, if that is known of it."""
    if is_collection(kind):
        return None
    if issubclass(kind, set | frozenset | deque):
        return lambda value: ((f"[{i}]", each) for i, each in enumerate(value))
    names = [*getattr(kind, "__dataclass_fields__", ()), *(each.name for each in getattr(kind, "__attrs_attrs__", ()))]
    if not names:
        return None
    return lambda value: ((f".{name}", getattr(value, name, None)) for name in names)
