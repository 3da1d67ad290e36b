"""What is wrong with how a value is nested: it has no end, or a resident lies where none is looked for."""

from __future__ import annotations

import copyreg
import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import compress, islice
from typing import Any, TypeAlias

from colocate._definitions.structure import named, structure_of
from colocate._system.by_type import by_type
from colocate._values.kinds import is_collection
from colocate._values.plain import PLAIN
from colocate.errors import SerializationError

_DEEP = 100  # levels; whatever walks values has room for more of them
_SHOWN = 4
_USUAL: tuple[Any, ...] = object.__reduce_ex__, object.__reduce__, object.__getstate__
_BY_NAME = type, types.ModuleType, types.FunctionType

Step: TypeAlias = "tuple[Step | None, str]"
"""How a part of a value is reached: from where, and how from there."""


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
    """Return the types of all that lies in a value, in lists, tuples, dicts, sets and declared fields, however deep.

    There may be more: the interpreter knows what objects refer to, fields or not. It knows that so fast that a batch of
    objects is looked through here first, and one by one only where something of a type that matters has been found.
    """
    kinds: set[type] = set()
    seen: set[int] = set()
    level = [value]
    while level:
        found = set(map(type, level))
        kinds |= found
        opened = set(filter(_opens, found))
        if not opened:
            break
        fresh = {id(item): item for item in compress(level, map(opened.__contains__, map(type, level)))}
        level = gc.get_referents(*map(fresh.__getitem__, fresh.keys() - seen))
        seen.update(fresh)
    return kinds


@by_type
def _opens(kind: type) -> bool:
    return issubclass(kind, dict | list | tuple) or has_fields(kind)


@by_type
def _declared(kind: type) -> tuple[str, ...] | None:
    """Return the fields that a class declares, or () of a set; None of other types."""
    if is_collection(kind):
        return None
    if issubclass(kind, set | frozenset | deque):
        return ()
    attrs = (each.name for each in getattr(kind, "__attrs_attrs__", ()))
    return (*getattr(kind, "__dataclass_fields__", ()), *attrs) or None


def has_fields(kind: type) -> bool:
    """Whether values of this type are sets, or of a class that declares its fields or has leaves."""
    return structure_of(kind) is not None or _declared(kind) is not None


@by_type
def has_attributes(kind: type) -> bool:
    """Whether `refuse_hidden` looks at attributes of values of this type that their class doesn't declare.

    It does if these are what whoever pickles one sends.
    """
    if kind in PLAIN or _opens(kind):
        return False
    if kind is types.SimpleNamespace:  # is pickled in its own way, which sends them
        return True
    own_way: tuple[Any, ...] = kind.__reduce_ex__, kind.__reduce__, kind.__getstate__
    has_own = own_way != _USUAL or kind in copyreg.dispatch_table
    return not (has_own or is_collection(kind) or issubclass(kind, _BY_NAME))


def _parts(item: Any, most: int, declared: bool) -> Iterator[tuple[str, Any]]:
    """Give the items or declared fields of a value, or else its attributes unless only declared ones count."""
    kind: type = type(item)
    structure, names = structure_of(kind), _declared(kind)
    if structure is not None:
        yield from islice(named(structure.open(item)), most)
    elif names:
        yield from ((f".{name}", getattr(item, name, None)) for name in names[:most])
    elif names is not None:
        yield from ((f"[{index}]", each) for index, each in enumerate(list(islice(item, most))))
    elif not declared and has_attributes(kind):
        state: Any = object.__getstate__(item)
        for each in state if isinstance(state, tuple) else (state,):  # with slots there are two
            yield from ((f".{name}", part) for name, part in islice((each or {}).items(), most))


def hides(value: Any, matters: Callable[[type], bool]) -> bool:
    """Whether something that matters is in a value of which `has_fields` is true, or in the key of a dict."""
    return _hidden(value, "", matters, type(value).__qualname__, sys.maxsize, declared=True)[0] is not None


def refuse_hidden(
    arguments: Mapping[str, Any],
    what: str,
    matters: Callable[[type], bool],
    why: Callable[[Any, str], str],
    holder: str = "",
    looks: int | None = None,
) -> None:
    """Refuse what `matters` where nothing replaces it by its value, with a `SerializationError`.

    That is everywhere but in lists, tuples and the values of dicts: in sets, keys, the fields of objects of classes
    that declare them, and the attributes of other objects; with a `holder`, in the values themselves too. `why` says
    what is wrong with it inside its holder, behind "it is …". `looks` bounds how many things are looked at, all
    arguments together; the nearest come first.
    """
    left = sys.maxsize if looks is None else looks
    for name, value in arguments.items():
        if type(value) in PLAIN:
            continue
        found, left = _hidden(value, name, matters, holder, left)
        if found is not None:
            way, culprit, holds = found
            steps: list[str] = []
            step: Step | None = way
            while step is not None:
                step, part = step
                steps.append(part)
            path = "".join(reversed(steps))
            raise SerializationError(
                f"{what}: {path} can't be sent: it is {culprit!r}, {why(culprit, holds)}", argument=name, path=path
            )


def _hidden(
    value: Any, name: str, matters: Callable[[type], bool], holder: str, looks: int, declared: bool = False
) -> tuple[tuple[Step, Any, str] | None, int]:
    """Return how what matters is reached, it, and what kind of thing holds it; and how many looks are left.

    `holder` holds what is in no set, key or object. With `declared` only those attributes count that a class declares.
    """
    seen: dict[int, Any] = {}  # by id(), with what it is of
    near: deque[tuple[Any, Step, str]] = deque([(value, (None, name), holder)])
    while near and looks > 0:
        item, way, holder = near.popleft()
        kind: type = type(item)
        if matters(kind):
            if holder:
                return (way, item, holder), looks
            continue
        if kind in PLAIN or id(item) in seen:
            continue
        seen[id(item)] = item
        # Taken at once: on threads somebody may be changing it. Long lists are mostly of plain items, which aren't
        # worth the words of their way.
        if isinstance(item, dict):
            pairs = list(islice(dict.items(item), looks))
            near.extend(
                (key, (way, f".keys()[{index}]"), "dict's key")
                for index, (key, _) in enumerate(pairs)
                if type(key) not in PLAIN
            )
            near.extend((each, (way, f"[{key!r}]"), holder) for key, each in pairs if type(each) not in PLAIN)
            looks -= len(pairs)
        elif isinstance(item, list | tuple):
            items = list(islice(item, looks))
            near.extend(
                (each, (way, f"[{index}]"), holder) for index, each in enumerate(items) if type(each) not in PLAIN
            )
            looks -= len(items)
        else:
            parts = _parts(item, looks, declared)
            near.extend((each, (way, step), kind.__qualname__) for step, each in parts if type(each) not in PLAIN)
        looks -= 1
    return None, looks
