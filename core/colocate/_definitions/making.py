"""Definitions made from what has come: first empty, so that others can refer to them, then filled.

What is known here by its id already is taken as it is and never filled again: a class that comes back is the class that
was sent, with what became of it meanwhile.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import enum
import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from colocate._definitions import ids, subclasses
from colocate._definitions.names import MISSING, is_main, main_module, script_names

_here = threading.local()  # .making: the bundle that this thread reads


class Making:
    """A block in which definitions are made: they are known by their ids once all of them are whole.

    Attributes:
        found: By their ids: those that are made, and those that were here already.
    """

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}
        self.open: dict[int, Any] = {}  # by id(): what has still to be filled; globals on their way, in words

    def __enter__(self) -> Making:
        self._outer = getattr(_here, "making", None)
        _here.making = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.making = self._outer

    def existing(self, id: int) -> Any:
        """Return what has an id here or in the bundle; None where nothing has."""
        found = self.found.get(id)
        if found is None and (found := ids.thing_of(id)) is not None:
            self.found[id] = found
        return found

    def make(self, id: int, maker: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make a definition, unless it exists."""
        thing = self.existing(id)
        if thing is None:
            thing = self.found[id] = maker(*args)
            self.open[builtins.id(thing)] = thing
        return thing

    @property
    def innermost(self) -> Any:
        """What was being made when that failed."""
        return next(reversed(self.open.values()), "what was sent with it")

    def fill(self, thing: Any, filler: Callable[[Any, Any], None], state: Any) -> None:
        """Fill a definition that was made here."""
        if self.open.get(builtins.id(thing)) is thing:
            filler(thing, state)
            del self.open[builtins.id(thing)]


def make(id: int, maker: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Make a definition of the bundle that is being read, or return the one that has its id here."""
    return _here.making.make(id, maker, args)


def fill(thing: Any, state: tuple[Any, Callable[[Any, Any], None], Any]) -> None:
    """Give a definition what couldn't be there before it was, if it was made just now."""
    _here.making.fill(thing, *state[1:])


def nothing(thing: Any, state: None) -> None:
    """Fill what is whole when it is made."""


def first(thing: Any, bound: None) -> Any:
    """Return a definition, with which the globals have come that its code names."""
    return thing


def named(id: int) -> Any:
    """Return a definition by its id."""
    making: Making | None = getattr(_here, "making", None)
    found = None if making is None else making.existing(id)
    return ids.find(id) if found is None else found


def shared(id: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what several globals or closures have: the object that came with the first of them, or a new one."""
    found = ids.thing_of(id)
    if found is None:
        found = make(*args)
        ids.note(id, found)
    return found


# -- functions

_bound: weakref.WeakKeyDictionary[ModuleType, dict[str, Any]] = weakref.WeakKeyDictionary()


def about(words: str) -> str:
    """Note what comes next."""
    _here.making.open[id(words)] = words
    return words


def bind_named(words: str, here: dict[str, Any], names: Mapping[str, Any]) -> None:
    """Set a global that has come with code."""
    bind(here, names)
    del _here.making.open[id(words)]


def bind(here: dict[str, Any], names: Mapping[str, Any]) -> None:
    """Set some globals; one of the script that role code has set itself meanwhile keeps its value."""
    main = main_module()
    if main is None or here is not main.__dict__:
        here.update(names)
        return
    before = _bound.setdefault(main, {})
    for name, value in names.items():
        if name not in before or here.get(name, MISSING) is before[name]:
            here[name] = value
        before[name] = value


def globals_of(module: str) -> dict[str, Any]:
    """Return the globals of functions that came: the script's, or those of the module that they are of."""
    return script_names() if is_main(module) else importlib.import_module(module).__dict__


def make_function(
    code: CodeType, names: dict[str, Any], name: None, defaults: None, closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Make a function without its defaults, and with empty cells."""
    names.setdefault("__builtins__", __builtins__)
    return FunctionType(code, names, name, defaults, closure)


def fill_function(function: FunctionType, state: tuple[Mapping[str, Any], dict[str, Any], Mapping[str, Any]]) -> None:
    """Give a function its attributes, what its cells have, and the globals that came with it."""
    own, slots, names = state
    del slots["_cloudpickle_submodules"]  # which are imported by now
    bind(function.__globals__, names)
    for its, came in zip(function.__closure__ or (), slots.pop("__closure__") or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            its.cell_contents = came.cell_contents
    function.__dict__.update(own)
    for name, value in slots.items():
        setattr(function, name, value)


def make_cache(function: Any, parameters: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Make a function under `functools.lru_cache`; its cache is this process's own."""
    cached: Any = functools.lru_cache(**parameters)(function)
    cached.__dict__.update(names)
    return cached


def make_cached_property(function: Any, name: str | None, doc: str | None) -> Any:
    """Make a `functools.cached_property`, which has a lock of its own before Python 3.12."""
    made: functools.cached_property[Any] = functools.cached_property(function)
    made.attrname, made.__doc__ = name, doc
    return made


# -- classes


def make_class(meta: Any, maker: Any, name: str, bases: tuple[Any, ...], names: dict[str, Any]) -> Any:
    """Make a class without its methods.

    Args:
        meta: Its metaclass.
        maker: The first of the metaclass's own classes that isn't the user's: the others would want the whole class.
        name: Its name.
        bases: Its bases.
        names: What has to be there when it is made.
    """
    namespace = {sys.intern(key): value for key, value in names.items()}
    with _untold(bases):
        return maker.__new__(meta, name, bases, namespace)


def make_parametrised(origin: Any, args: tuple[Any, ...]) -> Any:
    """Return the class that a generic class makes for arguments, and makes once."""
    return origin[args]


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


def make_enum(meta: Any, maker: Any, name: str, bases: tuple[Any, ...], members: Mapping[str, Any]) -> Any:
    """Make an enum with its members."""
    names = meta.__prepare__(name, bases)
    for member, value in members.items():
        names[member] = value
    return maker.__new__(meta, name, bases, names)


def fill_class(cls: Any, state: tuple[Mapping[str, Any], Sequence[type], Mapping[str, Mapping[str, Any]]]) -> None:
    """Give a class its methods and attributes, and the members of an enum theirs."""
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


# -- what else has a name, and exceptions


def make_thing(cls: Any) -> Any:
    """Make an object without its attributes."""
    return object.__new__(cls)


def fill_thing(thing: Any, names: Mapping[str, Any]) -> None:
    """Give an object its attributes."""
    for name, value in names.items():
        object.__setattr__(thing, name, value)


def make_exception(cls: Any, base: Any, args: tuple[Any, ...]) -> BaseException:
    """Make an exception with these `args`, whatever arguments the constructor of its class takes."""
    made: BaseException = base.__new__(cls, *args)
    base.__init__(made, *args)
    made.args = args
    return made
