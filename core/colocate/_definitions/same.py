"""Whether what two drivers have defined under one name is the same: then it is one class for both of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes, frozenset)
_CACHED = type(functools.lru_cache(maxsize=1)(len))
_INSIDE = ("__wrapped__", "fget", "func")  # what a decorator has made of a function has it as one of these
_CODE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")


def same(one: Any, other: Any) -> bool:
    """Whether two classes or functions say the same.

    Compared are names, bases, code, and values that are plain. Where the code stands makes no difference, nor does what
    is neither code nor plain: a field's description, say, which differs only where something else does, too.
    """
    return _same(one, other, set())


def _same(one: Any, other: Any, seen: set[tuple[int, int]]) -> bool:
    if one is other or (id(one), id(other)) in seen:
        return True
    seen.add((id(one), id(other)))
    if isinstance(one, type) or isinstance(other, type):
        return isinstance(one, type) and isinstance(other, type) and _same_classes(one, other, seen)
    if type(one) is not type(other):
        return _same(type(one), type(other), seen)
    parts: list[tuple[Any, Any]]
    if isinstance(one, FunctionType):
        parts = [(one.__code__, other.__code__), (one.__defaults__, other.__defaults__)]
    elif isinstance(one, CodeType):
        if any(getattr(one, name) != getattr(other, name) for name in _CODE):
            return False
        parts = [(one.co_consts, other.co_consts)]
    elif isinstance(one, property):
        parts = [(one.fget, other.fget), (one.fset, other.fset), (one.fdel, other.fdel)]
    elif isinstance(one, staticmethod | classmethod | _CACHED):
        parts = [(one.__wrapped__, other.__wrapped__)]
    elif isinstance(one, functools.cached_property):
        parts = [(one.func, other.func)]
    elif type(one) in (tuple, list):
        if len(one) != len(other):
            return False
        parts = list(zip(one, other, strict=True))
    else:
        return type(one) not in _PLAIN or one == other or one != one  # the last: not a number
    return all(_same(mine, its, seen) for mine, its in parts)


def _same_classes(one: type, other: type, seen: set[tuple[int, int]]) -> bool:
    path = ("__module__", "__qualname__")
    if any(getattr(one, name) != getattr(other, name) for name in path) or one.__module__ == "builtins":
        return False
    mine, its = _says(vars(one)), _says(vars(other))
    return (
        mine.keys() == its.keys()
        and _same(list(one.__bases__), list(other.__bases__), seen)
        and all(_same(value, its[name], seen) for name, value in mine.items())
    )


def _says(names: Mapping[str, Any]) -> dict[str, Any]:
    """What a class says itself, without what Python and caches have added."""
    return {name: value for name, value in names.items() if isinstance(value, FunctionType) or not name.startswith("_")}


def where(thing: Any, beside: Iterable[Any] = (), file: str | None = None) -> str:
    """File and line of a class or function, as far as its code says them.

    Args:
        thing: It.
        beside: Other things of its script, whose code may say the file.
        file: That of the script, where it is known.
    """
    for code in _codes(thing):
        return f"{code.co_filename}:{code.co_firstlineno}"
    files = {code.co_filename for each in beside for code in _codes(each)} if file is None else {file}
    return files.pop() if len(files) == 1 else "some line of its script"


def _codes(thing: Any) -> Iterator[CodeType]:
    """The code of a function, or of a class's own, that stands in a file: a dataclass has some that was generated."""
    for each in vars(thing).values() if isinstance(thing, type) else [thing]:
        found: Any = next((part for name in _INSIDE if (part := getattr(each, name, None)) is not None), each)
        if not isinstance(found, FunctionType) or found.__module__ != getattr(thing, "__module__", None):
            continue
        if not (file := found.__code__.co_filename).startswith("<") or file.startswith("<ipython"):
            yield found.__code__
