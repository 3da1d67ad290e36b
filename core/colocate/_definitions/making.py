"""Rebuild received definitions in two steps: create empty objects as targets of references, then set the contents.

An object with an id that is known here is used unchanged. A class that returns to its sender, for example, is the
original class with all later changes.

A base class that was sent arrives with the effects of `__init_subclass__` on the sender. A base imported here doesn't
know the new subclass, so its `__init_subclass__` is called when the subclass is complete. The options of the class
statement (`class Grid(Env, id="grid")`) aren't stored anywhere, so a base that needs some isn't called, and the driver
warns.
"""

from __future__ import annotations

import abc
import ast
import builtins
import contextlib
import enum
import functools
import importlib
import inspect
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from colocate._definitions import ids
from colocate._definitions.names import MISSING, find_import_path, get_main_module, get_script_names, is_main

_here = threading.local()  # `_here.making` is the bundle that this thread is rebuilding.


class Making:
    """A context manager with the state of one bundle while the bundle's definitions are rebuilt.

    Attributes:
        definitions: New definitions, and definitions that existed here already, by id.
        unfilled: Unfinished definitions, and descriptions of globals that are being rebuilt, by id().
        values: Namespaces of type aliases, by id() of the alias.
    """

    def __init__(self) -> None:
        self.definitions: dict[int, Any] = {}
        self.unfilled: dict[int, Any] = {}
        self.values: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Making:
        self._outer = getattr(_here, "making", None)
        _here.making = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.making = self._outer

    def find_existing(self, id: int) -> Any:
        """Return the object with this id in this process or in the bundle, or None."""
        thing = self.definitions.get(id)
        if thing is None and (thing := ids.get_thing(id)) is not None:
            self.definitions[id] = thing
        return thing


def make(id: int, maker: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Create an empty definition of the current bundle, or return the existing object with this id."""
    making: Making = _here.making
    thing = making.find_existing(id)
    if thing is None:
        thing = making.definitions[id] = maker(*args)
        making.unfilled[builtins.id(thing)] = thing
    return thing


def fill(thing: Any, state: tuple[Any, Callable[[Any, Any], None] | None, Any]) -> None:
    """Set the contents of a new definition; do nothing for a definition that existed before."""
    _, filler, contents = state
    if _here.making.unfilled.get(builtins.id(thing)) is thing:
        if filler is not None:
            filler(thing, contents)
        del _here.making.unfilled[builtins.id(thing)]


def first(thing: Any, bound: None) -> Any:
    """Return a definition, after unpickling the second argument has set the globals of the definition's code."""
    return thing


def named(id: int) -> Any:
    making: Making | None = getattr(_here, "making", None)
    thing = None if making is None else making.find_existing(id)
    return ids.find_thing(id) if thing is None else thing


def shared(id: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the object with this id, created at the first request, so that several globals can share a parameter."""
    thing = ids.get_thing(id)
    if thing is None:
        thing = make(*args)
        ids.register_id(id, thing)
    return thing


def found_at(module: str, path: str) -> Any:
    """Import a module, and return the attribute at a dotted path."""
    target: Any = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        target = getattr(target, part)
    return target


# -- functions

_bound: weakref.WeakKeyDictionary[ModuleType, dict[str, Any]] = weakref.WeakKeyDictionary()


def about(words: str) -> str:
    """Record the description of the global that is rebuilt next, for error texts."""
    _here.making.unfilled[id(words)] = words
    return words


def bind_named(words: str, here: dict[str, Any], names: Mapping[str, Any]) -> None:
    bind(here, names)
    del _here.making.unfilled[id(words)]


def bind(here: dict[str, Any], names: Mapping[str, Any]) -> None:
    """Set globals in a namespace, except globals of the script that role code has rebound in the meantime."""
    main = get_main_module()
    if main is None or here is not main.__dict__:
        here.update(names)
        return
    before = _bound.setdefault(main, {})
    for name, value in names.items():
        if name not in before or here.get(name, MISSING) is before[name]:
            here[name] = value
        before[name] = value


def globals_of(module: str) -> dict[str, Any]:
    """Return the globals for a received function, which are the script's or an imported module's namespace."""
    return get_script_names() if is_main(module) else importlib.import_module(module).__dict__


def make_function(
    code: CodeType, names: dict[str, Any], name: None, defaults: None, closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Create a function without defaults and with empty closure cells."""
    names.setdefault("__builtins__", __builtins__)
    return FunctionType(code, names, name, defaults, closure)


def fill_function(function: FunctionType, state: tuple[Mapping[str, Any], dict[str, Any], Mapping[str, Any]]) -> None:
    """Set the attributes, closure cells and globals of a new function."""
    attributes, slots, names = state
    del slots["_cloudpickle_submodules"]  # Unpickling this entry has imported the submodules.
    bind(function.__globals__, names)
    for cell, source_cell in zip(function.__closure__ or (), slots.pop("__closure__") or (), strict=True):
        with contextlib.suppress(ValueError):  # A closure cell is empty if the variable is unset.
            cell.cell_contents = source_cell.cell_contents
    function.__dict__.update(attributes)
    for name, value in slots.items():
        setattr(function, name, value)


def make_cache(function: Any, parameters: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Wrap a function in `functools.lru_cache`, with a fresh cache."""
    cached: Any = functools.lru_cache(**parameters)(function)
    cached.__dict__.update(names)
    return cached


# -- classes


def make_class(meta: Any, maker: Any, name: str, bases: tuple[Any, ...], names: dict[str, Any]) -> Any:
    """Create a class without methods, and without calling `__init_subclass__` of a base."""
    namespace = {sys.intern(key): value for key, value in names.items()}
    tellers = (ancestor for base in bases for ancestor in base.__mro__ if "__init_subclass__" in vars(ancestor))
    owner = next((ancestor for ancestor in tellers if ancestor is not object), object)
    hook: Any = vars(owner)["__init_subclass__"]
    if owner is object or _is_of_python(getattr(hook, "__func__", hook)):
        return maker.__new__(meta, name, bases, namespace)
    thread_id = threading.get_ident()

    # This substitute does nothing on this thread, but calls the hook for classes that other threads define meanwhile.
    def tell(cls: type, /, **options: Any) -> None:
        if threading.get_ident() != thread_id:
            hook.__get__(None, cls)(**options)

    type.__setattr__(owner, "__init_subclass__", classmethod(tell))
    try:
        return maker.__new__(meta, name, bases, namespace)
    finally:
        type.__setattr__(owner, "__init_subclass__", hook)


def make_enum(meta: Any, maker: Any, name: str, bases: tuple[Any, ...], members: Mapping[str, Any]) -> Any:
    names = meta.__prepare__(name, bases)
    for member, value in members.items():
        names[member] = value
    return maker.__new__(meta, name, bases, names)


def fill_class(cls: Any, state: tuple[Mapping[str, Any], Sequence[type], Mapping[str, Mapping[str, Any]]]) -> None:
    """Set the attributes of a class and of an enum's members, then call a base's `__init_subclass__`."""
    names, registered, members = state
    for name, value in names.items():
        type.__setattr__(cls, name, value)
    if "__firstlineno__" in names:  # Since Python 3.13, setting `__module__` removes this attribute.
        type.__setattr__(cls, "__firstlineno__", names["__firstlineno__"])
    for subclass in registered:
        abc.ABCMeta.register(cls, subclass)
    for name, attributes in members.items():
        cls.__members__[name].__dict__.update(attributes)
    if issubclass(cls, enum.Enum) or (base_hook := _find_hook(cls)) is None or not _needs_no_options(base_hook[1]):
        return
    before = dict(vars(cls))
    base_hook[1]()
    # Restore the attributes as sent, because the hook may have overwritten values set after the class statement.
    for name, value in before.items():
        if vars(cls).get(name) is not value:
            type.__setattr__(cls, name, value)


def warn_of_lost_options(things: Iterable[Any]) -> None:
    """Warn of classes for which workers can't call a base's `__init_subclass__` with the class statement's options."""
    for cls in things:
        if not isinstance(cls, type) or (base_hook := _find_hook(cls)) is None:
            continue
        owner, hook = base_hook
        if _needs_no_options(hook) and not (_has_options(hook) and _uses_options(cls)):
            continue
        text = (
            f"{cls.__qualname__} was defined with options for its base {owner.__module__}.{owner.__qualname__}, and "
            "these don't travel: the workers' base doesn't hear of the class, or hears of it without them. Define it "
            "in a module beside the script, which the workers import"
        )
        try:
            file, line = inspect.getsourcefile(cls) or cls.__module__, inspect.getsourcelines(cls)[1]
        except (OSError, TypeError, SystemError):  # A class in a notebook cell may have no source file.
            file, line = cls.__module__, 1
        warnings.warn_explicit(text, RuntimeWarning, file, line)


def _find_hook(cls: type) -> tuple[type, Callable[..., Any]] | None:
    """Return the nearest importable base that defines `__init_subclass__`, and the hook; None without such a base.

    None also stands for a hook of the standard library, because these hooks run in any case.
    """
    for base in cls.__mro__[1:]:
        if (hook := vars(base).get("__init_subclass__")) is not None and (
            base is object or find_import_path(base) is not None
        ):
            return None if _is_of_python(getattr(hook, "__func__", hook)) else (base, hook.__get__(None, cls))
    return None


def _is_of_python(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0] in sys.stdlib_module_names


def _has_options(hook: Callable[..., Any]) -> bool:
    """Return whether a hook has named options. `**options` doesn't count, because a metaclass may take these."""
    try:
        kinds = {parameter.kind for parameter in inspect.signature(hook).parameters.values()}
    except ValueError:  # A compiled hook may have no signature.
        return False
    return not kinds.isdisjoint({inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD})


def _needs_no_options(hook: Callable[..., Any]) -> bool:
    try:
        inspect.signature(hook).bind()
    except TypeError:
        return False
    except ValueError:  # A compiled hook may have no signature.
        pass
    return True


def _uses_options(cls: type) -> bool:
    """Return whether a class statement has keyword options; False if the source isn't available."""
    try:
        statement = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError, SystemError):  # Python 3.11's `ast` isn't thread-safe (SystemError).
        return False
    return isinstance(statement, ast.ClassDef) and any(keyword.arg != "metaclass" for keyword in statement.keywords)


# -- what else has a name, and exceptions


def make_parameter(kind: Any, name: str, constraints: tuple[Any, ...], options: Mapping[str, Any], module: str) -> Any:
    parameter = kind(name, *constraints, **options)
    parameter.__module__ = module
    return parameter


def make_alias(name: str, module: str) -> Any:
    """Create a type alias (`type Json = ...`) without a value, because the value may refer to the alias itself."""
    names = {"__name__": module}
    exec(f"type {name} = __value__", names)
    alias = names[name]
    _here.making.values[id(alias)] = names
    return alias


def fill_alias(alias: Any, value: Any) -> None:
    _here.making.values.pop(id(alias))["__value__"] = value


def make_generic_alias(kind: Any, name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    return kind(name, value, type_params=parameters)


def make_thing(cls: Any) -> Any:
    return object.__new__(cls)


def fill_thing(thing: Any, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        object.__setattr__(thing, name, value)


def make_exception(cls: Any, base: Any, args: tuple[Any, ...]) -> BaseException:
    """Create an exception with these `args` without calling the constructor, which may take other arguments."""
    exception: BaseException = base.__new__(cls, *args)
    base.__init__(exception, *args)
    exception.args = args
    return exception
