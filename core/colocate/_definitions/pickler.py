"""cloudpickle for everything that colocate sends: classes and functions that can't be imported elsewhere have an id.

In a body they are only named, and what its receiver needs before it is noted (`needs`). In a bundle they are by value,
as cloudpickle has them, but for what that would make another thing of.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import cloudpickle
from cloudpickle import cloudpickle as details

from colocate._definitions import making
from colocate._definitions.ids import Definition, Name, Need, id_of
from colocate._definitions.names import can_be_imported, is_main, path_of, script_names
from colocate._system.by_type import by_type

_CACHED = type(functools.lru_cache(maxsize=1)(len))
_SENTINELS = {
    id(getattr(dataclasses, name)): name for name in ("MISSING", "_HAS_DEFAULT_FACTORY") if hasattr(dataclasses, name)
}
_SPECIAL = (
    type,
    FunctionType,
    types.CodeType,
    _CACHED,
    functools.cached_property,
    BaseException,
    type(dataclasses.MISSING),
)
_OF_ENUMS = {"_generate_next_value_", "_member_names_", "_member_map_", "_member_type_", "_value2member_map_"}
_OF_MEMBERS = {"_value_", "_name_", "__objclass__", "_sort_order_"}
_CODE = (type, FunctionType, types.BuiltinFunctionType, types.ModuleType, _CACHED)
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


@by_type
def is_special(kind: type) -> bool:
    """Whether values of this type have a way of their own here."""
    return issubclass(kind, _SPECIAL) or _may_be_a_name(kind)


def _may_be_a_name(kind: type) -> bool:
    """Whether values of this type say how they are pickled, in Python: it may be by the name that they have."""
    return not issubclass(kind, enum.Enum) and any(
        isinstance(vars(each).get(name), FunctionType)
        for each in kind.__mro__
        for name in ("__reduce__", "__reduce_ex__")
    )


class Content(Protocol):
    """What definitions are put into: a bundle."""

    anonymous: bool  # the script's globals go with the functions that name them: its receiver has a script of its own

    def has(self, definition: Definition) -> bool:
        """Whether a definition that is met goes into it; otherwise it is named."""
        ...

    def names_for(self, names: Iterable[str], user: str) -> dict[str, Any]:
        """The globals of the script that go into it for code which names these."""
        ...


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, but for definitions: those that a `bundle` has are put into that, all others are named."""

    def __init__(
        self, file: Any, buffer_callback: Callable[[Any], Any] | None = None, bundle: Content | None = None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.needs: dict[int | str, Need] = {}
        self.bundle = bundle
        self.has_trained = False  # tensors of which gradients are computed
        self._begun: set[type] = set()  # classes whose contents are being pickled
        self.named: list[list[_Bound]] = []  # the globals that code of open definitions names
        self.unmade: list[int] = []  # open definitions which aren't even empty ones yet

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle what has a way of its own."""
        kind: Any = type(obj)
        if not is_special(kind):
            return NotImplemented
        if kind is FunctionType:
            return self._function(obj)
        if kind is types.CodeType:
            return _code(obj)
        if issubclass(kind, type):
            return self._class(obj)
        if kind is _CACHED:
            return NotImplemented if path_of(obj) is not None else self._defined(obj, _cache)
        if kind is functools.cached_property:
            return making.make_cached_property, (obj.func, obj.attrname, obj.__doc__)
        if isinstance(obj, BaseException):
            return _exception(obj)
        if id(obj) in _SENTINELS:
            return _SENTINELS[id(obj)]
        return NotImplemented if kind in self.dispatch_table else self._named(obj)

    # -- by an id

    def _defined(self, thing: Any, by_value: Callable[[Any], Any]) -> Any:
        definition = Definition(id_of(thing), thing)
        if self.bundle is None:
            self.needs[definition.id] = definition
        elif self.unmade.count(definition.id) == 1 or self.bundle.has(definition):  # its base may have led to it
            return making.first, (_Made(self, definition, by_value), _Globals(self, isinstance(thing, type)))
        return making.named, (definition.id,)

    def _named(self, obj: Any) -> Any:
        """As pickle would; what is only a name of the script (a `NewType`, a sentinel) has an id there as here."""
        reduced = obj.__reduce_ex__(5)
        if not isinstance(reduced, str):
            return reduced
        module = getattr(obj, "__module__", None)
        return self._defined(obj, _thing) if is_main(module) else reduced

    def _class(self, cls: Any) -> Any:
        if type(cls) is type and (cls in _SINGLETONS or cls in details._BUILTIN_TYPE_NAMES):
            return details._class_reduce(cls)
        if _parametrised(cls) is not None:
            return self._defined(cls, self._class_by_arguments)
        return NotImplemented if path_of(cls) is not None else self._defined(cls, self._class_by_value)

    def _function(self, function: FunctionType) -> Any:
        if path_of(function) is not None:
            return NotImplemented
        if _leads_to(function):
            return self._defined(function, self._dynamic_function_reduce)
        return self._dynamic_function_reduce(function)

    # -- by value

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """As cloudpickle, but for globals: where they arrive, functions of a module have that module's.

        What a definition names comes when that is whole: a global may be a value of the very class.
        """
        names: dict[str, Any] = func.__globals__
        module, is_script = str(names.get("__name__")), names is script_names()
        is_there = not (self.bundle is not None and self.bundle.anonymous) if is_script else _is_module(module, names)
        if is_there:
            self.globals_ref.setdefault(id(names), _Module("__main__" if is_script else module))
        _, args, (own, slots), *_ = super()._dynamic_function_reduce(func)
        found: dict[str, Any] = slots.pop("__globals__")
        used, came = list(found) if is_script or not is_there else [], {}
        if self.bundle is None and is_there:
            self.needs.update({name: Name(name, func.__qualname__) for name in used})
        elif self.named:
            self.named[-1] += [_Bound(self, names, name, func.__qualname__) for name in used]
        else:
            came = self.names_for(names, used, func.__qualname__)
        return making.make_function, args, (own, slots, came), None, None, making.fill_function

    def globals_to_bind(self, names: Sequence[Name]) -> Any:
        """Return what sets some globals of the script where it arrives."""
        script = script_names()
        if names:
            self.globals_ref[id(script)] = _Module("__main__")
        return _code_first([_Bound(self, script, *each) for each in names])

    def names_for(self, names: dict[str, Any], used: Iterable[str], user: str) -> dict[str, Any]:
        """Return some of the globals of a function, as far as they go along."""
        if names is script_names() and self.bundle is not None and not self.bundle.anonymous:
            return self.bundle.names_for(used, user)
        return {name: names[name] for name in used}

    def _class_by_arguments(self, cls: Any) -> Any:
        origin, args = _parametrised(cls) or (cls, ())
        if self._begun.isdisjoint((*origin.__mro__, *_classes_in(args))):
            return making.make_parametrised, (origin, args)
        return self._class_by_value(cls)  # what it would be made of isn't whole at the receiver yet

    def _class_by_value(self, cls: Any) -> Any:
        """As cloudpickle, but no code of the user's runs for a class that isn't whole, and enums are as they were."""
        names, _ = details._class_getstate(cls)
        registered = names.pop("_abc_impl", ())
        meta = type(cls)
        maker = next(each for each in meta.__mro__ if path_of(each) is not None or each is type)
        if maker.__name__ == "_TypedDictMeta":  # its own would want the annotations, and no `dict` among the bases
            maker = type
        if issubclass(cls, enum.Enum):
            members = {name: member._value_ for name, member in cls.__members__.items()}
            names = {name: value for name, value in names.items() if name not in members and name not in _OF_ENUMS}
            given = {name: _of_member(member) for name, member in cls.__members__.items() if _of_member(member)}
            names["__qualname__"] = cls.__qualname__
            made: Any = making.make_enum, (meta, maker, cls.__name__, cls.__bases__, members)
            return *made, (names, registered, given), None, None, making.fill_class
        names = {name: value for name, value in names.items() if not _is_slot_of(cls, value)}
        first = {name: names.pop(name) for name in list(names) if _comes_first(name, names[name])}
        first |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        self._begun.add(cls)
        made = making.make_class, (meta, maker, cls.__name__, cls.__bases__, first)
        return *made, (names, registered, _Whole(self._begun, cls)), None, None, making.fill_class


class _Made:
    """A definition by value, whole, but for the globals that its code names."""

    def __init__(self, pickler: Pickler, definition: Definition, by_value: Callable[[Any], Any]) -> None:
        self._pickler = pickler
        self._definition = definition
        self._by_value = by_value

    def __reduce__(self) -> Any:
        self._pickler.named.append([])
        self._pickler.unmade.append(self._definition.id)
        maker, args, *more = self._by_value(self._definition.thing)
        state = (more[3], more[0]) if more else (making.nothing, None)
        made = making.make, (self._definition.id, maker, args)
        return *made, (_Empty(self._pickler, self._definition.id), *state), None, None, making.fill


class _Empty:
    """Stands before the contents of a definition: there is an empty one now, to which others can refer."""

    def __init__(self, pickler: Pickler, id: int) -> None:
        self._pickler = pickler
        self._id = id

    def __reduce__(self) -> Any:
        self._pickler.unmade.remove(self._id)
        return dict, ()


class _Globals:
    """Stands behind a definition: the globals that its code names.

    Those of a method come behind the class: they may be values of that. And none comes where it may lead to a class
    that isn't made yet.
    """

    def __init__(self, pickler: Pickler, is_class: bool) -> None:
        self._pickler = pickler
        self._is_class = is_class

    def __reduce__(self) -> Any:
        named = self._pickler.named.pop()
        if self._pickler.unmade or (self._pickler.named and not self._is_class):
            self._pickler.named[-1] += named
            named = []
        return list, (_code_first(named),)


class _Bound:
    """A global that code names, as it is when this is pickled; what its value is rebuilt with has come by then."""

    def __init__(self, pickler: Pickler, names: dict[str, Any], name: str, user: str) -> None:
        self._pickler = pickler
        self._names = names
        self._name = name
        self._user = user

    def __reduce__(self) -> Any:
        home = self._pickler.globals_ref[id(self._names)]
        came = self._pickler.names_for(self._names, (self._name,), self._user)
        words = f"the global {self._name!r} of {self._names.get('__name__')}, which {self._user} names,"
        return (making.bind_named, (_About(words), home, came)) if came else (dict, ())

    @property
    def is_code(self) -> bool:
        """Whether nothing of the user's runs when it is rebuilt."""
        value = self._names.get(self._name)
        return isinstance(value, _CODE) or type(value) in _ATOMS


class _About:
    """Stands before a value: what that is, should it fail to be rebuilt."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __reduce__(self) -> Any:
        return making.about, (self._words,)


def _code_first(named: list[_Bound]) -> list[_Bound]:
    return sorted(named, key=lambda each: not each.is_code)


class _Module:
    """Stands for the globals of a module, which are there where it arrives."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return making.globals_of, (self._module,)


def _cache(cached: Any) -> Any:
    names = {name: value for name, value in cached.__dict__.items() if name != "__wrapped__"}
    return making.make_cache, (cached.__wrapped__, dict(cached.cache_parameters()), names)


def _thing(thing: Any) -> Any:
    slots = (name for each in type(thing).__mro__ for name, value in vars(each).items() if _is_slot_of(each, value))
    state = {
        **getattr(thing, "__dict__", {}),
        **{name: getattr(thing, name) for name in slots if hasattr(thing, name)},
    }
    return making.make_thing, (type(thing),), state, None, None, making.fill_thing


_SINGLETONS = (type(None), type(Ellipsis), type(NotImplemented))


class _Whole:
    """Stands last in the contents of a class, where an enum has its members': the class is whole then."""

    def __init__(self, begun: set[type], cls: type) -> None:
        self._begun = begun
        self._cls = cls

    def __reduce__(self) -> Any:
        self._begun.discard(self._cls)
        return dict, ()


def _code(code: types.CodeType) -> Any:
    """As cloudpickle does, with its file, which some releases leave out: tracebacks show its lines."""
    make, args = details._code_reduce(code)
    return make, (*args[:_CODE_FILE], code.co_filename, *args[_CODE_FILE + 1 :])


_CODE_FILE = 10  # among the arguments of `CodeType`


def _parametrised(cls: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The generic class and the arguments that give this very class, as pydantic's do: they note it, and cache it."""
    of = vars(cls).get("__pydantic_generic_metadata__")
    if not isinstance(of, dict) or not isinstance(of.get("origin"), type):
        return None
    return (of["origin"], of["args"]) if of["origin"][of["args"]] is cls else None


def _classes_in(args: Iterable[Any]) -> Iterator[type]:
    for each in args:
        if isinstance(each, type):
            yield each
        yield from _classes_in(typing.get_args(each))


def _is_module(name: str, names: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a module that can be imported elsewhere."""
    module = sys.modules.get(name)
    return module is not None and module.__dict__ is names and can_be_imported(name)


def _leads_to(function: FunctionType) -> bool:
    """Whether its name leads to a function: one that stays, and not one of many that a line makes."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _is_slot_of(cls: type, value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType) and value.__objclass__ is cls


def _comes_first(name: str, value: Any) -> bool:
    """What a class is made with: its slots, and plain constants, which whoever makes it may look at."""
    return name in ("__slots__", "__orig_bases__") or type(value) in _ATOMS


def _of_member(member: Any) -> dict[str, Any]:
    own = getattr(member, "__dict__", {})
    return {name: value for name, value in own.items() if name not in _OF_MEMBERS}


def _exception(error: BaseException) -> Any:
    """As pickle would, but its class isn't called: its constructor may take other arguments than its `args`."""
    kind = type(error)
    base: Any = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP)
    if base is kind or kind.__reduce__ is not base.__reduce__ or kind.__reduce_ex__ is not base.__reduce_ex__:
        return NotImplemented
    reduced = error.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or reduced[0] is not kind:
        return NotImplemented
    return making.make_exception, (kind, base, reduced[1]), *reduced[2:]


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by Python code
