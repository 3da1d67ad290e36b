"""Say where inside a value the thing is that can't be sent."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from colocate._definitions.codec import pack
from colocate.errors import SerializationError

# A value that is nested deeper, or has more items at a level, is searched only so far.
_DEPTH = 50
_ITEMS = 10_000


def explain(value: Any, name: str, error: BaseException) -> SerializationError:
    """Find the deepest thing inside a value that can't be pickled."""
    path, culprit, cause = deepest(value, name, error, pack)
    return SerializationError(
        f"{path} can't be sent: it is {kind_and_cause(culprit, cause)}. "
        + advice(
            culprit,
            "Send plain data and make such a thing where it is needed, inside the role; or leave it out by the "
            "__getstate__ of what holds it.",
        ),
        argument=name,
        path=path,
    )


def deepest(
    value: Any, name: str, error: BaseException, pickle: Callable[[Any], object]
) -> tuple[str, Any, BaseException]:
    """Return the path, as a user would say it, to the deepest thing inside a value that fails; the thing, its error.

    Args:
        value: What has failed.
        name: What the user calls it.
        error: What it has raised.
        pickle: Raises what is wrong with a part.
    """
    path, owner, culprit, cause = name, "", value, error
    seen: set[int] = set()
    while len(seen) < _DEPTH and id(culprit) not in seen:
        seen.add(id(culprit))
        for step, part in islice(_parts(culprit), _ITEMS):  # noqa: B007  # what they are at the break
            try:
                pickle(part)
            except Exception as error:
                cause = error
                break
        else:
            break
        if isinstance(culprit, types.FunctionType) and not step.startswith("."):
            path, owner = step, f" of {culprit.__name__}"
        else:
            path += step
        culprit = part
    return (f"the variable {path}{owner}" if owner else path), culprit, cause


def kind_and_cause(culprit: Any, cause: BaseException) -> str:
    """Return what can't be pickled, and why, in words."""
    kind = type(culprit)
    article = "an" if kind.__qualname__[:1].lower() in "aeiou" else "a"
    module = _module_of(kind)
    module = "colocate" if module.startswith("colocate._") else module  # where users know it from
    return f"{article} {module}.{kind.__qualname__} ({str(cause) or type(cause).__name__})"


def advice(culprit: Any, usual: str) -> str:
    """Return what to do instead of sending something."""
    if _module_of(type(culprit)).partition(".")[0] != "colocate":
        return usual
    return (
        "What a method needs of the driver it is given as an argument: a value, or a resident; a role finds the others "
        "of its worker by ctx.sibling(name, cls)"
    )


def _module_of(kind: type) -> str:
    """Return the module of a class, by what Python wrote down of it: a metaclass may have an attribute of that name."""
    module = type.__dict__["__module__"].__get__(kind)
    return module if isinstance(module, str) else "?"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what pickling a value pickles, with how that is reached; what a function closes over, by its name alone."""
    if isinstance(value, dict):
        yield from ((f".keys()[{i}]", key) for i, key in enumerate(value))
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, types.FunctionType):
        with suppress(ValueError):  # a variable that isn't set yet
            yield from inspect.getclosurevars(value).nonlocals.items()
            yield ".__defaults__", value.__defaults__
            yield ".__kwdefaults__", value.__kwdefaults__
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, type):
        for name, item in vars(value).items():
            parts = [item]
            if isinstance(item, staticmethod | classmethod):
                parts = [item.__func__]
            elif isinstance(item, property):
                parts = [each for each in (item.fget, item.fset, item.fdel) if each is not None]
            elif isinstance(item, types.GetSetDescriptorType | types.MemberDescriptorType):
                parts = []
            yield from ((f".{name}", part) for part in parts)
    if not isinstance(value, type | types.FunctionType | types.MethodType | types.ModuleType):
        yield from _state(value)


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object's pickle consists of."""
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:
        return  # It can't be pickled itself.
    if not isinstance(reduced, tuple) or len(reduced) < 2:
        return
    state = reduced[2] if len(reduced) > 2 else None
    for i, part in enumerate(state if isinstance(state, tuple) else (state,)):
        if isinstance(part, dict):
            yield from ((f".{name}", item) for name, item in part.items())
        else:
            yield f".__reduce__()[2][{i}]", part
    yield from ((f".__reduce__()[1][{i}]", item) for i, item in enumerate(reduced[1]) if item is not type(value))
