"""Classes and functions made from what travelled: first empty, so that others can refer to them, then filled.

What is known here by its id already is taken as it is and never filled again: a class that comes back is the class that
was sent, with what became of it meanwhile.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from colocate._definitions import known, subclasses
from colocate._definitions.names import is_main

_here = threading.local()  # .filling: by id(object), what this thread makes now; keeps it alive meanwhile


class Making:
    """A block in which definitions are made: they are known by their ids once all of them are whole.

    Attributes:
        made: By their ids.
        functions: Those that no name leads to, which refer to these.
        found: What was here already.
    """

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.functions: dict[int, FunctionType] = {}
        self.found: list[known.Definition] = []

    def __enter__(self) -> Making:
        self._outer = getattr(_here, "making", None)
        _here.making = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.making = self._outer


def _made(id: int, thing: Any) -> Any:
    """Something new, to be filled."""
    making: Making | None = getattr(_here, "making", None)
    filling: dict[int, Any] = _here.__dict__.setdefault("filling", {})
    filling[builtins_id(thing)] = thing
    if making is not None:
        making.made[id] = thing
    return thing


builtins_id = id


def _is_new(thing: Any) -> bool:
    """Whether something was made just now, and hasn't been filled yet."""
    filling: dict[int, Any] = _here.__dict__.setdefault("filling", {})
    return filling.pop(builtins_id(thing), None) is thing


def _existing(id: int) -> Any:
    making: Making | None = getattr(_here, "making", None)
    if making is not None and id in making.made:
        return making.made[id]
    found = known.known(id)
    if found is not None and making is not None:
        making.found.append(found)
    return None if found is None else found.object


def named(id: int) -> Any:
    """A class or function by its id."""
    existing = _existing(id)
    return known.find(id).object if existing is None else existing


def make_shared(id: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What several globals or closures have: the object that came with the first of them, or else a new one."""
    return known.shared(id, lambda: make(*args))


# -- functions


def make_function(
    id: int | None,
    is_defined: bool,
    code: CodeType,
    space: tuple[str | int, str],
    name: str,
    cells: tuple[CellType, ...] | None,
) -> Any:
    """A function, or the one that has its id here. Without an id it is a new one."""
    if id is not None:
        existing = _existing(id) if is_defined else known.function_known(id)
        if existing is not None:
            return existing
    function = FunctionType(code, globals_of(*space), name, None, cells)
    if id is not None and is_defined:
        return _made(id, function)
    _here.__dict__.setdefault("filling", {})[builtins_id(function)] = function
    return function


def globals_of(key: str | int, module: str) -> dict[str, Any]:
    """The globals of functions that came: the module's own, where it is one."""
    if isinstance(key, str) and not is_main(key):
        return importlib.import_module(key).__dict__
    return known.whole_space_named(key, module).names


def fill_function(
    function: FunctionType, state: tuple[Mapping[str, Any], Mapping[str, Any], Sequence[Any], int | None]
) -> None:
    """What couldn't be there before the function was. One that no name leads to is known by its id then."""
    if not _is_new(function):
        return
    names, slots, cells, id = state
    function.__dict__.update(names)
    for cell, contents in cells:
        cell.cell_contents = contents
    for name, value in slots.items():
        setattr(function, name, value)
    if id is not None:
        making: Making | None = getattr(_here, "making", None)
        if making is None:
            known.note_function(id, function)
        else:  # what it refers to needn't be whole, and may be made once more
            making.functions[id] = function


def make_cache(id: int, function: Any, parameters: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """A function under `functools.lru_cache`; its cache is this process's own."""
    existing = _existing(id)
    if existing is not None:
        return existing
    cached: Any = functools.lru_cache(**parameters)(function)
    cached.__dict__.update(names)
    return _made(id, cached)


def make_cached_property(function: Any, name: str | None, doc: str | None) -> Any:
    """A `functools.cached_property`, which has a lock of its own before Python 3.12."""
    made: functools.cached_property[Any] = functools.cached_property(function)
    made.attrname, made.__doc__ = name, doc
    return made


# -- classes


def make_class(id: int, meta: Any, maker: Any, name: str, bases: tuple[Any, ...], names: dict[str, Any]) -> Any:
    """A class without its methods, or the one that has its id here.

    Args:
        id: Its id.
        meta: Its metaclass.
        maker: The first of the metaclass's own classes that isn't the user's: the others would want the whole class.
        name: Its name.
        bases: Its bases.
        names: What has to be there when it is made.
    """
    existing = _existing(id)
    if existing is not None:
        return existing
    namespace = {sys.intern(key): value for key, value in names.items()}
    with _untold(bases):
        made = maker.__new__(meta, name, bases, namespace)
    return _made(id, made)


def make_parametrised(id: int, origin: Any, args: tuple[Any, ...]) -> Any:
    """A class that a generic class makes for arguments, and makes once: the one that code here gets of it, too."""
    existing = _existing(id)
    return make_known(id, origin[args]) if existing is None else existing


def make_known(id: int, thing: Any) -> Any:
    """What is here without having been made now."""
    making: Making | None = getattr(_here, "making", None)
    if making is not None:
        making.made[id] = thing
    return thing


@contextlib.contextmanager
def _untold(bases: Sequence[type]) -> Iterator[None]:
    """A block in which bases aren't told of the subclass that this thread makes, as they are of others.

    It isn't whole yet (see `subclasses`). The standard library's are told, as ever.
    """
    tellers = (each for base in bases for each in base.__mro__ if "__init_subclass__" in vars(each))
    owner = next((each for each in tellers if each is not object), object)
    hook: Any = vars(owner)["__init_subclass__"]
    module = (getattr(getattr(hook, "__func__", hook), "__module__", None) or "").partition(".")[0]
    if owner is object or module in sys.stdlib_module_names:
        yield
        return
    here = threading.get_ident()

    def tell(cls: type, /, **options: Any) -> None:
        if threading.get_ident() != here:
            hook.__get__(None, cls)(**options)

    type.__setattr__(owner, "__init_subclass__", classmethod(tell))
    try:
        yield
    finally:
        type.__setattr__(owner, "__init_subclass__", hook)


def make_enum(id: int, meta: Any, maker: Any, name: str, bases: tuple[Any, ...], members: Mapping[str, Any]) -> Any:
    """An enum with its members, or the one that has its id here."""
    existing = _existing(id)
    if existing is not None:
        return existing
    names = meta.__prepare__(name, bases)
    for member, value in members.items():
        names[member] = value
    return _made(id, maker.__new__(meta, name, bases, names))


def fill_class(cls: Any, state: tuple[Mapping[str, Any], Sequence[type], Mapping[str, Mapping[str, Any]]]) -> None:
    """What couldn't be there before the class was: its methods and attributes."""
    if not _is_new(cls):
        return
    names, registered, members = state
    for name, value in names.items():
        type.__setattr__(cls, name, value)
    if "__firstlineno__" in names:  # Python 3.13 drops it whenever an attribute is set
        type.__setattr__(cls, "__firstlineno__", names["__firstlineno__"])
    for each in registered:
        abc.ABCMeta.register(cls, each)
    for name, attributes in members.items():
        cls.__members__[name].__dict__.update(attributes)
    if not issubclass(cls, enum.Enum):
        subclasses.tell(cls)


# -- other things that have a name


def make_thing(id: int, cls: Any) -> Any:
    """An object without its attributes, or the one that has its id here."""
    existing = _existing(id)
    return _made(id, object.__new__(cls)) if existing is None else existing


def fill_thing(thing: Any, names: Mapping[str, Any]) -> None:
    """What couldn't be there before the object was."""
    if _is_new(thing):
        for name, value in names.items():
            object.__setattr__(thing, name, value)


# -- exceptions


def make_exception(cls: Any, base: Any, args: tuple[Any, ...]) -> BaseException:
    """An exception with these `args`, whatever arguments the constructor of its class takes."""
    made: BaseException = base.__new__(cls, *args)
    base.__init__(made, *args)
    made.args = args
    return made
