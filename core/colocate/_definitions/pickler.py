"""Pickle values with cloudpickle, and refer by id to classes and functions that other processes can't import.

A message's body only refers to definitions, and lists them as needs of the receiver. A bundle contains definitions by
value like cloudpickle, except where cloudpickle would create a different object. The module `making` rebuilds them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import pickle
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as details

from colocate._definitions import making
from colocate._definitions.ids import Definition, Name, Need, get_id
from colocate._definitions.names import (
    ALIASES,
    can_be_imported,
    find_import_path,
    find_module_path,
    get_script_names,
    is_main,
)
from colocate._definitions.structure import arrived, structure_of
from colocate._system.by_type import by_type

_CACHED = type(functools.lru_cache(maxsize=1)(len))
_SENTINELS = {
    id(getattr(dataclasses, name)): name for name in ("MISSING", "_HAS_DEFAULT_FACTORY") if hasattr(dataclasses, name)
}
_PARAMETERS = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple)
_OF_TYPES = (*_PARAMETERS, *ALIASES)
_SPECIAL = (
    *(type, FunctionType, types.CodeType, types.ModuleType, _CACHED),
    *(functools.cached_property, BaseException, type(dataclasses.MISSING), *_OF_TYPES),
)
_SINGLETONS = (type(None), type(Ellipsis), type(NotImplemented))
_OF_ENUMS = {"_generate_next_value_", "_member_names_", "_member_map_", "_member_type_", "_value2member_map_"}
_OF_MEMBERS = {"_value_", "_name_", "__objclass__", "_sort_order_"}
_CODE = (type, FunctionType, types.BuiltinFunctionType, types.ModuleType, _CACHED)
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_FIRST = ("__slots__", "__orig_bases__")
_CODE_FILE = 10  # `CodeType` takes the file name at this index.
_HEAP = 1 << 9  # This is Py_TPFLAGS_HEAPTYPE, the flag of classes that Python code has created.


_TIED = {
    ("multiprocessing.managers", "BaseProxy"): "its Manager lets in only processes that multiprocessing has started",
    ("multiprocessing.connection", "_ConnectionBase"): "it is a descriptor, which this process alone has",
}
"""Maps types (module and class name) that pickle accepts to the reason why other processes can't use the values."""


@by_type
def _explain_tied(kind: type) -> str | None:
    """Return the reason why other processes can't use pickled values of a type; None for other types."""
    for (module, name), why in _TIED.items():
        if issubclass(kind, getattr(sys.modules.get(module), name, ())):
            return why
    return None


@by_type
def is_special(kind: type) -> bool:
    """Return whether this module has a special reduction for values of a type.

    That includes types with a reduction written in Python, because such a reduction may refer to a name in the script.
    """
    if structure_of(kind) is not None or _explain_tied(kind) is not None:
        return True
    return issubclass(kind, _SPECIAL) or (
        not issubclass(kind, enum.Enum)
        and any(
            isinstance(vars(base).get(name), FunctionType)
            for base in kind.__mro__
            for name in ("__reduce__", "__reduce_ex__")
        )
    )


class _LateReduction:
    """A placeholder that defers a reduction until the pickler reaches this object."""

    def __init__(self, reduce: Callable[[], Any]) -> None:
        self._reduce = reduce

    def __reduce__(self) -> Any:
        return self._reduce()


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A cloudpickle pickler (definitions by value) that sends modules by name, even instances of module subclasses."""

    def reducer_override(self, obj: Any) -> Any:
        """Return a reduction by name for a module, and cloudpickle's reduction for other objects."""
        return reduce_module(obj) if issubclass(type(obj), types.ModuleType) else super().reducer_override(obj)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A cloudpickle pickler that packs definitions by value into `bundle`, or sends only ids without a bundle."""

    def __init__(self, file: Any, buffer_callback: Callable[[Any], Any] | None = None, bundle: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.needs: dict[int | str, Need] = {}
        self.bundle = bundle
        self.has_trained = False  # Becomes True for a value with parameters or other leaves of autograd.
        self._open_classes: set[type] = set()  # Holds the classes that aren't completely pickled yet.
        # For each unfinished definition, lists the globals that the code uses, as (namespace, name, user of the name).
        self._pending_names: list[list[tuple[dict[str, Any], str, str]]] = []
        self._uncreated: list[int] = []  # Lists the ids of definitions that the pickle hasn't created yet.

    def reducer_override(self, obj: Any) -> Any:
        """Return the special reduction of an object, or NotImplemented to use the usual reduction."""
        kind: Any = type(obj)
        if not is_special(kind):
            return NotImplemented
        if (why := _explain_tied(kind)) is not None:
            raise pickle.PicklingError(why)
        if kind is FunctionType:
            if find_import_path(obj) is not None:
                return NotImplemented
            by_value = self._dynamic_function_reduce
            return self._reduce_definition(obj, by_value) if _is_reachable(obj) else by_value(obj)
        if kind is types.CodeType:  # Keep the file name for tracebacks, which some cloudpickle releases drop.
            make, args = details._code_reduce(obj)
            return make, (*args[:_CODE_FILE], obj.co_filename, *args[_CODE_FILE + 1 :])
        if issubclass(kind, type):
            if kind is type and (obj in _SINGLETONS or obj in details._BUILTIN_TYPE_NAMES):
                return details._class_reduce(obj)
            if (generic := _find_generic(obj)) is not None:
                return self._reduce_definition(obj, partial(self._reduce_class_by_arguments, *generic))
            return (
                NotImplemented
                if find_import_path(obj) is not None
                else self._reduce_definition(obj, self._reduce_class_by_value)
            )
        if issubclass(kind, types.ModuleType):
            return reduce_module(obj)
        if kind is _CACHED:
            return NotImplemented if find_import_path(obj) is not None else self._reduce_definition(obj, _reduce_cache)
        if kind is functools.cached_property:
            # Leave out the lock, which a cached property has before Python 3.12.
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}
        if kind in _OF_TYPES:
            if find_import_path(obj) is not None:
                return NotImplemented
            return self._reduce_definition(obj, _reduce_parameter if kind in _PARAMETERS else _reduce_alias)
        if isinstance(obj, BaseException):
            return _reduce_exception(obj)
        if id(obj) in _SENTINELS:
            return _SENTINELS[id(obj)]
        # Send the leaves of registered types, because a type's own reduction could copy tensors into the pickle.
        if (structure := structure_of(kind)) is not None:
            return arrived, (kind, structure.open_value(obj))
        if kind in self.dispatch_table:
            return NotImplemented
        reduced = obj.__reduce_ex__(5)
        # An object that reduces to a name in the script (a `NewType` or a sentinel) is sent as a definition.
        is_name = isinstance(reduced, str) and is_main(getattr(obj, "__module__", None))
        return self._reduce_definition(obj, _reduce_thing) if is_name else reduced

    # -- by an id

    def _reduce_definition(self, thing: Any, by_value: Callable[[Any], Any]) -> Any:
        definition = Definition(get_id(thing), thing)
        if self.bundle is None:
            self.needs[definition.id] = definition
        # Pack the definition if the receiver lacks the id, or if pickling a base class has led back here.
        elif (times := self._uncreated.count(definition.id)) == 1 or self.bundle.add_definition(definition):
            later = _LateReduction(partial(self._reduce_whole, definition, by_value))
            return making.first, (later, _LateReduction(partial(self._reduce_globals, isinstance(thing, type))))
        elif times:
            raise TypeError(f"what {thing} is made of leads to itself")
        return making.named, (definition.id,)

    def _reduce_whole(self, definition: Definition, by_value: Callable[[Any], Any]) -> Any:
        """Return the reduction that creates an empty definition and then sets the contents. Globals are set later."""
        self._pending_names.append([])
        self._uncreated.append(definition.id)
        maker, args, *more = by_value(definition.thing)
        filler, state = (more[3], more[0]) if more else (None, None)

        def is_there() -> Any:  # The contents, pickled next, may refer to the definition.
            self._uncreated.remove(definition.id)
            return dict, ()

        reduced = making.make, (definition.id, maker, args)
        return *reduced, (_LateReduction(is_there), filler, state), None, None, making.fill

    def _reduce_globals(self, is_class: bool) -> Any:
        """Return the reductions that set a definition's globals, to be pickled after the definition itself.

        A method's globals follow the class, because they may be instances of it. While any class isn't created yet, all
        globals wait.
        """
        named = self._pending_names.pop()
        if self._uncreated or (self._pending_names and not is_class):
            self._pending_names[-1] += named
            named = []
        return list, (self._reduce_bindings(named),)

    def reduce_script_globals(self, names: Sequence[Name]) -> Any:
        """Return the reductions that set globals of the script in the receiver."""
        script = get_script_names()
        if names:
            self.globals_ref[id(script)] = _LateReduction(lambda: (making.globals_of, ("__main__",)))
        return self._reduce_bindings([(script, name.name, name.user) for name in names])

    def _reduce_bindings(self, named: list[tuple[dict[str, Any], str, str]]) -> list[_LateReduction]:
        """Return the reductions that set globals. Code comes first, because rebuilding code never runs user code."""

        def is_code(each: tuple[dict[str, Any], str, str]) -> bool:
            value = each[0].get(each[1])
            return isinstance(value, _CODE) or type(value) in _ATOMS

        return [
            _LateReduction(partial(self._reduce_binding, *each))
            for each in sorted(named, key=lambda each: not is_code(each))
        ]

    def _reduce_binding(self, names: dict[str, Any], name: str, user: str) -> Any:
        values = self._collect_names(names, (name,), user)
        if not values:
            return dict, ()
        words = f"the global {name!r} of {names.get('__name__')}, which {user} names,"
        about = _LateReduction(
            lambda: (making.about, (words,))
        )  # If the global's value can't be rebuilt, the error quotes these words.
        return making.bind_named, (about, self.globals_ref[id(names)], values)

    def _collect_names(self, names: dict[str, Any], used: Iterable[str], user: str) -> dict[str, Any]:
        """Return the globals to send along with a function, without globals that the receiver has already."""
        if names is get_script_names() and self.bundle is not None and not self.bundle.anonymous:
            values: dict[str, Any] = self.bundle.add_names(used, user)
            return values
        return {name: names[name] for name in used}

    # -- by value

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """Reduce a function like cloudpickle, but with the globals of the receiver's copy of the module.

        Used globals are set after the definition is complete, because a global may be an instance of the class.
        """
        names: dict[str, Any] = func.__globals__
        module, is_script = str(names.get("__name__")), names is get_script_names()
        if is_script:
            is_there = not (self.bundle is not None and self.bundle.anonymous)
        else:
            home_module = sys.modules.get(module)
            is_there = home_module is not None and home_module.__dict__ is names and can_be_imported(module)
        if is_there:
            home = "__main__" if is_script else module
            self.globals_ref.setdefault(id(names), _LateReduction(lambda: (making.globals_of, (home,))))
        _, args, (attributes, slots), *_ = super()._dynamic_function_reduce(func)
        used = list(slots.pop("__globals__"))
        used, global_values = used if is_script or not is_there else [], {}
        if self.bundle is None and is_there:
            self.needs.update({name: Name(name, func.__qualname__) for name in used})
        elif self._pending_names:
            self._pending_names[-1] += [(names, name, func.__qualname__) for name in used]
        else:
            global_values = self._collect_names(names, used, func.__qualname__)
        return making.make_function, args, (attributes, slots, global_values), None, None, making.fill_function

    def _reduce_class_by_arguments(self, origin: Any, args: tuple[Any, ...], cls: Any) -> Any:
        if self._open_classes.isdisjoint((*origin.__mro__, *_iter_classes(args))):
            return operator.getitem, (origin, args)  # Subscripting the generic class creates the class only once.
        return self._reduce_class_by_value(cls)  # The receiver hasn't completed the generic class yet.

    def _reduce_class_by_value(self, cls: Any) -> Any:
        """Reduce a class like cloudpickle, but run no user code on unfinished classes."""
        names, _ = details._class_getstate(cls)
        registered = names.pop("_abc_impl", ())
        meta = type(cls)
        maker = next(
            candidate for candidate in meta.__mro__ if find_import_path(candidate) is not None or candidate is type
        )
        # The metaclass of TypedDict expects annotations, and doesn't accept `dict` as a base.
        if maker.__name__ == "_TypedDictMeta":
            maker = type
        first: dict[str, Any]
        make: Callable[..., Any]
        if issubclass(cls, enum.Enum):
            first = {name: member._value_ for name, member in cls.__members__.items()}
            names = {name: value for name, value in names.items() if name not in first and name not in _OF_ENUMS}
            names["__qualname__"] = cls.__qualname__
            of_members: Any = {
                name: {key: value for key, value in vars(member).items() if key not in _OF_MEMBERS}
                for name, member in cls.__members__.items()
                if hasattr(member, "__dict__")
            }
            make = making.make_enum
        else:
            # The creation of a class needs the slots, and a metaclass may read plain constants.
            first = {
                name: candidate for name, candidate in names.items() if name in _FIRST or type(candidate) in _ATOMS
            }
            names = {
                name: candidate
                for name, candidate in names.items()
                if name not in first and not _is_slot_of(cls, candidate)
            }
            first |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            self._open_classes.add(cls)

            def is_whole() -> Any:  # This is pickled as the last part of the contents.
                self._open_classes.discard(cls)
                return dict, ()

            of_members = _LateReduction(is_whole)
            make = making.make_class
        reduced = make, (meta, maker, cls.__name__, cls.__bases__, first)
        return *reduced, (names, registered, of_members), None, None, making.fill_class


def _reduce_cache(cached: Any) -> Any:
    names = {name: value for name, value in cached.__dict__.items() if name != "__wrapped__"}
    return making.make_cache, (cached.__wrapped__, dict(cached.cache_parameters()), names)


def _reduce_parameter(parameter: Any) -> Any:
    # Some of these attributes only exist in newer Python releases.
    names = ("bound", "covariant", "contravariant", "infer_variance", "default")
    options = {name: getattr(parameter, f"__{name}__") for name in names if hasattr(parameter, f"__{name}__")}
    constraints = getattr(parameter, "__constraints__", ())
    if hasattr(parameter, "has_default") and not parameter.has_default():
        del options["default"]
    return making.make_parameter, (type(parameter), parameter.__name__, constraints, options, parameter.__module__)


def _reduce_alias(alias: Any) -> Any:
    if alias.__type_params__:
        return making.make_generic_alias, (type(alias), alias.__name__, alias.__value__, alias.__type_params__)
    return making.make_alias, (alias.__name__, alias.__module__), alias.__value__, None, None, making.fill_alias


def _reduce_thing(thing: Any) -> Any:
    slots = (name for base in type(thing).__mro__ for name, value in vars(base).items() if _is_slot_of(base, value))
    state = getattr(thing, "__dict__", {}) | {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return making.make_thing, (type(thing),), state, None, None, making.fill_thing


def _find_generic(cls: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the generic class and the type arguments of a parametrised pydantic class; None for other classes."""
    of = vars(cls).get("__pydantic_generic_metadata__")
    if not isinstance(of, dict) or not isinstance(of.get("origin"), type):
        return None
    return (of["origin"], of["args"]) if of["origin"][of["args"]] is cls else None


def _iter_classes(args: Iterable[Any]) -> Iterator[type]:
    for arg in args:
        if isinstance(arg, type):
            yield arg
        yield from _iter_classes(typing.get_args(arg))


def _is_reachable(function: FunctionType) -> bool:
    """Return whether a look-up of a function's qualified name finds this function, not a later one of the same name."""
    target: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is function


def _is_slot_of(cls: type, value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType) and value.__objclass__ is cls


def reduce_module(module: types.ModuleType) -> Any:
    """Return the reduction of a module by name, also for instances of a module subclass, such as torch.backends."""
    if (place := find_module_path(module)) is not None:
        return making.found_at, place
    if type(module) is types.ModuleType:
        return details._module_reduce(module)
    if {"__reduce__", "__reduce_ex__"} & {name for base in type(module).__mro__[:-1] for name in vars(base)}:
        return module.__reduce_ex__(5)
    raise pickle.PicklingError("code has made this module, and no import leads to it")


def _reduce_exception(error: BaseException) -> Any:
    """Reduce an exception so that rebuilding skips the constructor, which may take other arguments than `args`."""
    kind = type(error)
    base: Any = next(ancestor for ancestor in kind.__mro__ if not ancestor.__flags__ & _HEAP)
    if base is kind or kind.__reduce__ is not base.__reduce__ or kind.__reduce_ex__ is not base.__reduce_ex__:
        return NotImplemented
    reduced = error.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or reduced[0] is not kind:
        return NotImplemented
    return making.make_exception, (kind, base, reduced[1]), *reduced[2:]
