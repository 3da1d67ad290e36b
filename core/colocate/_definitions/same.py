"""Whether what two drivers have defined under one name is the same: then it is one class for both of them."""

from __future__ import annotations

import bisect
import dis
import enum
import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, TypeAlias

import attrs

_PLAIN = (type(None), bool, int, float, complex, str, bytes, frozenset)
_CACHED = type(functools.lru_cache(maxsize=1)(len))
_INSIDE = ("__wrapped__", "fget", "func")  # what a decorator has made of a function has it as one of these
_TOLD = ("__wrapped__", "spec")  # and what `@method` was told beside it
_CODE = (
    *("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)
# A method's call is compiled otherwise if what it is looked up in is a module that the script imports somewhere.
_LIKE = {"LOAD_METHOD": "LOAD_ATTR"}
_NOTHING = ("PUSH_NULL", "EXTENDED_ARG", "NOP")
_MISSING = object()
_Seen: TypeAlias = dict[tuple[int, int], tuple[Any, Any]]
"""The pairs that are being compared, or have been, by their ids: as long as they are held no others have these."""


def same(one: Any, other: Any) -> bool:
    """Whether two classes or functions say the same.

    Compared are names, bases, code, and values that are plain. Where the code stands makes no difference, nor does what
    is neither code nor plain: a field's description, say, which differs only where something else does, too.
    """
    return _same(one, other, {})


def _same(one: Any, other: Any, seen: _Seen) -> bool:
    if one is other or (id(one), id(other)) in seen:
        return True
    seen[id(one), id(other)] = one, other
    if isinstance(one, type) or isinstance(other, type):
        return isinstance(one, type) and isinstance(other, type) and _same_classes(one, other, seen)
    if not _same(type(one), type(other), seen):
        return False
    parts: list[tuple[Any, Any]]
    if isinstance(one, FunctionType):
        parts = [(_parts_of(one), _parts_of(other))]
    elif isinstance(one, CodeType):
        if any(getattr(one, name) != getattr(other, name) for name in _CODE) or _steps(one) != _steps(other):
            return False
        parts = [(one.co_consts, other.co_consts)]
    elif isinstance(one, property):
        parts = [(one.fget, other.fget), (one.fset, other.fset), (one.fdel, other.fdel)]
    elif isinstance(one, staticmethod | classmethod | _CACHED):
        parts = [(one.__wrapped__, other.__wrapped__)]
    elif isinstance(one, functools.cached_property):
        parts = [(one.func, other.func)]
    elif isinstance(one, functools.partial | functools.partialmethod):
        parts = [((one.func, one.args, *_pairs(one.keywords)), (other.func, other.args, *_pairs(other.keywords)))]
    elif type(one) in (tuple, list):
        if len(one) != len(other):
            return False
        parts = list(zip(one, other, strict=True))
    elif isinstance(one, enum.Enum):
        parts = [(one.value, other.value)]
    elif attrs.has(type(one)):
        names = [field.name for field in attrs.fields(type(one))]
        parts = [(getattr(one, name, _MISSING), getattr(other, name, _MISSING)) for name in names]
    elif type(one) in _PLAIN:
        return bool(one == other or one != one)  # the last: not a number
    else:
        parts = [(getattr(one, name, _MISSING), getattr(other, name, _MISSING)) for name in _TOLD]
    return all(_same(mine, its, seen) for mine, its in parts)


def _parts_of(function: FunctionType) -> tuple[Any, ...]:
    """What a function does: its code, and the values that this has beside globals, such as what a decorator wraps."""
    cells = function.__closure__ or ()
    return (
        function.__code__,
        function.__defaults__,
        *_pairs(function.__kwdefaults__ or {}),
        *map(_content, cells),
    )


def _steps(code: CodeType) -> list[tuple[str, object]]:
    """The instructions of some code, without what differs by what else its script says."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in _NOTHING]
    places = [each.offset for each in steps]
    found: list[tuple[str, object]] = []
    for each in steps:
        value: object = each.arg
        if each.opcode in dis.hasname:
            value = each.argval
        elif each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            value = bisect.bisect_left(places, each.argval)
        found.append((_LIKE.get(each.opname, each.opname), value))
    return found


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been put there yet
        return _MISSING


def _pairs(named: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(named.items(), key=lambda pair: pair[0])


def _same_classes(one: type, other: type, seen: _Seen) -> bool:
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
    """What a class says itself, without what Python and caches have added: all code, and values with public names."""
    return {name: value for name, value in names.items() if _has_code(value) or not name.startswith("_")}


def _has_code(value: Any) -> bool:
    """Whether it is a function, or what a decorator has made of one."""
    return any(isinstance(each, FunctionType) for each in (value, *(getattr(value, name, None) for name in _INSIDE)))


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
