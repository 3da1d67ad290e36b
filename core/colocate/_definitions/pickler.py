"""The pickler of everything that colocate sends: classes and functions that can't be imported elsewhere get a name.

What a value needs at its receiver is noted while it is pickled (`needs`); nobody's registry is changed for it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, Protocol

import cloudpickle
from cloudpickle import cloudpickle as details

from colocate._definitions import making
from colocate._definitions.known import Definition, Need, Space, definition_of, function_id, global_of, space_of
from colocate._definitions.names import can_be_imported, is_main, main_module, path_of
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


class Whole(Protocol):
    """What definitions are put into: a lot."""

    def has_to_have(self, definition: Definition) -> bool:
        """Whether a definition that is met goes into it; otherwise it is named."""
        ...

    def key_of(self, space: Space) -> str | int:
        """What a space is called at its receiver."""
        ...

    def will_need(self, found: Need) -> None:
        """Something that what is in it refers to."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, but for classes and functions: with a `lot` they are put into that, otherwise they are named."""

    def __init__(
        self, file: Any, buffer_callback: Callable[[Any], Any] | None = None, lot: Whole | None = None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.needs: dict[int, Need] = {}
        self.lot = lot
        self.has_functions = False  # such that no name leads to
        self.makes_anew = False  # these where they arrive, though they may be there
        self.has_trained = False  # tensors of which gradients are computed
        self._shells: dict[int, _Shell] = {}
        self._begun: set[type] = set()  # classes whose contents are being pickled

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
            return NotImplemented if path_of(obj) is not None else self._defined(obj, self._cached_by_value)
        if kind is functools.cached_property:
            return making.make_cached_property, (obj.func, obj.attrname, obj.__doc__)
        if isinstance(obj, BaseException):
            return _exception(obj)
        if id(obj) in _SENTINELS:
            return _SENTINELS[id(obj)]
        return NotImplemented if kind in self.dispatch_table else self._named(obj)

    # -- names

    def _named(self, obj: Any) -> Any:
        """As pickle would; what is only a name of the script (a `NewType`, a sentinel) has an id there as here."""
        reduced = obj.__reduce_ex__(5)
        if not isinstance(reduced, str):
            return reduced
        module = getattr(obj, "__module__", None)
        return self._defined(obj, self._thing_by_value) if is_main(module) else reduced

    def _thing_by_value(self, thing: Any, id: int) -> Any:
        slots = (name for each in type(thing).__mro__ for name, value in vars(each).items() if _is_slot_of(each, value))
        state = {
            **getattr(thing, "__dict__", {}),
            **{name: getattr(thing, name) for name in slots if hasattr(thing, name)},
        }
        return making.make_thing, (id, type(thing)), state, None, None, making.fill_thing

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
            return self._defined(function, self._defined_function)
        self.has_functions = True
        return self._function_by_value(function, None if self.makes_anew else function_id(function), False)

    def _defined(self, thing: Any, by_value: Callable[[Any, int], Any]) -> Any:
        definition = definition_of(thing)
        lot = self.lot
        if lot is None:
            self.needs[definition.id] = definition
        elif lot.has_to_have(definition):
            return by_value(thing, definition.id)
        return making.named, (definition.id,)

    # -- by value

    def _defined_function(self, function: FunctionType, id: int) -> Any:
        return self._function_by_value(function, id, True)

    def _function_by_value(self, function: FunctionType, id: int | None, is_defined: bool) -> Any:
        code, names = function.__code__, function.__globals__
        module = names.get("__name__") or function.__module__ or ""
        if is_main(module) or not _is_module(module, names):
            space = space_of(names)
            for name in details._extract_code_globals(code):  # those of functions inside it, too
                self._need(global_of(space, name, function.__qualname__))
            where = space.key if self.lot is None else self.lot.key_of(space), module
        else:
            where = module, module
        cells = None if function.__closure__ is None else tuple(self._shell(cell) for cell in function.__closure__)
        own, slots = details._function_getstate(function)
        slots = dict(slots)
        for name in ("__globals__", "__closure__", "__name__"):
            del slots[name]
        filled = [(self._shell(cell), cell.cell_contents) for cell in function.__closure__ or () if _is_full(cell)]
        made = making.make_function, (id, is_defined, code, where, function.__name__, cells)
        return *made, (own, slots, filled, None if is_defined else id), None, None, making.fill_function

    def _shell(self, cell: Any) -> _Shell:
        """A cell without its contents; functions that share it still do where they arrive."""
        return self._shells.setdefault(id(cell), _Shell(cell))

    def _cached_by_value(self, cached: Any, id: int) -> Any:
        parameters = dict(cached.cache_parameters())
        names = {name: value for name, value in cached.__dict__.items() if name != "__wrapped__"}
        return making.make_cache, (id, cached.__wrapped__, parameters, names)

    def _class_by_arguments(self, cls: Any, id: int) -> Any:
        origin, args = _parametrised(cls) or (cls, ())
        if self._begun.isdisjoint((*origin.__mro__, *_classes_in(args))):
            return making.make_parametrised, (id, origin, args)
        return self._class_by_value(cls, id)  # what it would be made of isn't whole at the receiver yet

    def _class_by_value(self, cls: Any, id: int) -> Any:
        main = main_module()
        path: str = cls.__qualname__
        if is_main(cls.__module__) and main is not None and main.__dict__.get(path) is cls:
            # Under its name, too: then plain pickle finds it there.
            self._need(global_of(space_of(main.__dict__), path, path))
        names, _ = details._class_getstate(cls)
        registered = names.pop("_abc_impl", ())
        meta = type(cls)
        maker = next(each for each in meta.__mro__ if path_of(each) is not None or each is type)
        if maker.__name__ == "_TypedDictMeta":  # its own would want the annotations, and no `dict` among the bases
            maker = type
        if issubclass(cls, enum.Enum):
            members = {name: member._value_ for name, member in cls.__members__.items()}
            state = {name: value for name, value in names.items() if name not in members and name not in _OF_ENUMS}
            given = {name: _of_member(member) for name, member in cls.__members__.items() if _of_member(member)}
            enumerated = making.make_enum, (id, meta, maker, cls.__name__, cls.__bases__, members)
            state["__qualname__"] = path
            return *enumerated, (state, registered, given), None, None, making.fill_class
        names = {name: value for name, value in names.items() if not _is_slot_of(cls, value)}
        first = {name: names.pop(name) for name in list(names) if _comes_first(name, names[name])}
        first |= {"__module__": cls.__module__, "__qualname__": path}
        made = making.make_class, (id, meta, maker, cls.__name__, cls.__bases__, first)
        self._begun.add(cls)
        return *made, (names, registered, _Whole(self._begun, cls)), None, None, making.fill_class

    def _need(self, found: Need) -> None:
        if self.lot is None:
            self.needs[id(found)] = found
        else:
            self.lot.will_need(found)


_SINGLETONS = (type(None), type(Ellipsis), type(NotImplemented))


class _Shell:
    """A cell that will be filled when the function that has it is there."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell  # keeps its id its own

    def __reduce__(self) -> Any:
        return details._make_empty_cell, ()


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


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


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
