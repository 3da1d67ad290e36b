"""What this process knows by id: its own definitions that have been named, and those that others have sent.

An id belongs to one object for as long as somebody can name it. Definitions are held by whoever may hear of them again
(a group for what its workers know, a worker for what its driver has sent), and so is the object: no id ever leads to
another object than the one that was sent. An object that exists beyond that keeps its ids, held by nobody here.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeAlias

from colocate._definitions.names import MISSING, is_main, main_module
from colocate._system.off_main import off_main
from colocate.errors import ColocateError

_ORIGIN_BITS, _NUMBER_BITS = 30, 32
_OWN = "__colocate_space__"  # beside `__builtins__`, which no code names either


class Definition:
    """A class or function and its id.

    Attributes:
        id: Unique among all processes.
        object: The very class or function.
        links: What the lot that it was last sent in depends on; None before that.
    """

    __slots__ = ("__weakref__", "id", "links", "object")

    def __init__(self, id: int, object: Any) -> None:
        self.id = id
        self.object = object
        self.links: Links | None = None


class Space:
    """The globals of functions that travel.

    Attributes:
        key: Names them in every process: "__main__", or an id for those that belong to no module.
        names: The dictionary itself.
        foreign: Whether all in it came from elsewhere. Then it is there as long as the dictionary, which names it.
        set: What names were set to here, as that came.
    """

    __slots__ = ("__weakref__", "foreign", "globals", "key", "names", "set")

    def __init__(self, key: str | int, names: dict[str, Any], foreign: bool = False) -> None:
        self.key = key
        self.names = names
        self.foreign = foreign
        self.globals: dict[str, Global] = {}
        self.set: dict[str, Any] = {}


class Global:
    """A name in a space that code which travels refers to.

    Attributes:
        space: The space.
        name: The name.
        user: What names it, for errors.
        links: What the lot in which its value was last sent depends on; None before that.
    """

    __slots__ = ("links", "name", "space", "user")

    def __init__(self, space: Space, name: str, user: str) -> None:
        self.space = space
        self.name = name
        self.user = user
        self.links: Links | None = None

    @property
    def value(self) -> Any:
        """What it is now; MISSING when it isn't there."""
        return self.space.names.get(self.name, MISSING)


class Links:
    """What a lot depends on besides what is in it: names that may change, and definitions that were sent before."""

    __slots__ = ("globals", "others")

    def __init__(self, globals: Iterable[Global], others: Iterable[Definition]) -> None:
        self.globals = tuple(globals)
        self.others = tuple(others)


Need: TypeAlias = "Definition | Global"

lock = (
    threading.RLock()
)  # never taken on the main thread; for what is found here together: an object's id, the loading of a lot
_by_id: weakref.WeakValueDictionary[int, Definition] = weakref.WeakValueDictionary()
_by_object: weakref.WeakValueDictionary[int, Definition] = weakref.WeakValueDictionary()
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_ids: dict[int, int] = {}  # by id() of an object, which another one may have by now: `_objects` says whether it is that
_spaces: weakref.WeakValueDictionary[int, Space] = weakref.WeakValueDictionary()
_spaces_by_key: weakref.WeakValueDictionary[str | int, Space] = weakref.WeakValueDictionary()
# Functions that no name leads to (lambdas, inner functions) travel by value each time, and are held by nobody here:
# one that comes back while it still exists is the very one.
_functions: weakref.WeakValueDictionary[int, FunctionType] = weakref.WeakValueDictionary()
_function_ids: weakref.WeakKeyDictionary[FunctionType, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
_origin = secrets.randbits(_ORIGIN_BITS)

# How this process comes by a definition that it lacks: from a lot that has come, and a worker asks its driver.
find_arrived: Callable[[int], Definition | None] | None = None
find_missing: Callable[[int], None] | None = None
load_into: Callable[[str | int], None] | None = None  # has it set what has come of a space's globals


def new_id() -> int:
    """An id that nothing has."""
    return _origin << _NUMBER_BITS | next(_numbers)


def this_driver() -> int:
    """This process, as ids have it."""
    return _origin


def driver_of(id: int) -> int:
    """The process that has given an id."""
    return id >> _NUMBER_BITS


def beside(id: int) -> list[Any]:
    """What else is here of the process that has given an id."""
    return [each.object for each in list(_by_object.values()) if driver_of(each.id) == driver_of(id)]


def _after_fork() -> None:
    # What the child defines from now on is its own.
    global _origin
    _origin = secrets.randbits(_ORIGIN_BITS)


os.register_at_fork(after_in_child=_after_fork)


def definition_of(thing: Any) -> Definition:
    """The definition of a class or function of this process; it has an id from now on."""
    found = _by_object.get(id(thing))
    return found if found is not None else off_main(lambda: _new_definition(thing))


def _new_definition(thing: Any) -> Definition:
    with lock:
        found = _by_object.get(id(thing))
        if found is None:
            former = _ids.get(id(thing), 0)
            found = Definition(former if _objects.get(former) is thing else new_id(), thing)
            _note(found)
        return found


def _note(definition: Definition) -> None:
    thing, address = definition.object, id(definition.object)
    _by_id[definition.id] = definition
    if _objects.get(_ids.get(address, 0)) is not thing:
        _ids[address] = definition.id  # its first: what goes out keeps its name
    if _ids[address] == definition.id:
        _by_object.setdefault(address, definition)
    with contextlib.suppress(TypeError):  # a sentinel that can't be referred to weakly has its id while it is held
        _objects[definition.id] = thing


def defined(id: int, thing: Any) -> Definition:
    """An object that came under an id: known by it from now on, by whoever holds the definition."""
    found = _by_id.get(id)
    return found if found is not None else off_main(lambda: _new_defined(id, thing))


def _new_defined(id: int, thing: Any) -> Definition:
    with lock:
        found = _by_id.get(id)
        if found is None:
            found = Definition(id, thing)
            _note(found)
        return found


def also(id: int, thing: Any) -> Definition:
    """An object that has an id here already and is known elsewhere by this one: by whoever holds the definition."""
    definition_of(thing)  # what goes out keeps its name
    return defined(id, thing)


def known(id: int) -> Definition | None:
    """What has this id here, if anything has."""
    found = _by_id.get(id)
    return off_main(lambda: _revived(id)) if found is None and id in _objects else found


def _revived(id: int) -> Definition | None:
    with lock:
        found, thing = _by_id.get(id), _objects.get(id)
        return found if found is not None or thing is None else _new_defined(id, thing)


def find(id: int) -> Definition:
    """What has this id, here or at whoever can be asked.

    Raises:
        ColocateError: Nobody knows it any more.
    """
    found = _here(id)
    if found is None and find_missing is not None:
        find_missing(id)
        found = _here(id)
    if found is None:
        raise ColocateError(
            "a value names a class or function of the script that this process doesn't know (any more): the group "
            "that it came from is closed, or another driver has defined it"
        )
    return found


def _here(id: int) -> Definition | None:
    return known(id) or (None if find_arrived is None else find_arrived(id))


def shared_id(thing: Any) -> int:
    """The id of something that is one object wherever code that travels has it. Nobody holds it for that."""

    def find() -> int:
        with lock:
            found = _ids.get(id(thing), 0)
            if _objects.get(found) is not thing:
                found = _ids[id(thing)] = new_id()
                _objects[found] = thing
            return found

    return off_main(find)


def shared(id: int, make: Callable[[], Any]) -> Any:
    """What has come under such an id and still exists here, or else what is made now."""

    def find() -> Any:
        with lock:
            found = _objects.get(id)
            if found is None:
                found = _objects[id] = make()
                _ids[builtins.id(found)] = id
            return found

    return off_main(find)


def function_id(function: FunctionType) -> int:
    """The id of a function that no name leads to."""
    found = _function_ids.get(function)
    return found if found is not None else off_main(lambda: _new_function_id(function))


def _new_function_id(function: FunctionType) -> int:
    with lock:
        found = _function_ids.get(function)
        if found is None:
            found = new_id()
            _functions[found] = function
            _function_ids[function] = found
        return found


def function_known(id: int) -> FunctionType | None:
    """The function of that id, while it exists here."""
    return _functions.get(id)


def note_function(id: int, function: FunctionType) -> None:
    """A function that came under an id."""

    def note() -> None:
        with lock:
            _functions.setdefault(id, function)
            _function_ids.setdefault(function, id)

    off_main(note)


def space_of(names: dict[str, Any]) -> Space:
    """The space of a function's globals."""
    found = _spaces.get(id(names))
    if found is not None and found.names is names:
        return found
    return off_main(lambda: _new_space(names))


def _new_space(names: dict[str, Any]) -> Space:
    with lock:
        main = main_module()
        key = "__main__" if main is not None and main.__dict__ is names else new_id()
        found = _spaces[id(names)] = Space(key, names)
        if key != "__main__":
            _spaces_by_key[key] = found
        return found


def space_named(key: str | int, name: str) -> Space:
    """The space of a key that came from elsewhere; a new one, of which `name` is the `__name__`, if it is unknown."""
    return off_main(lambda: _space_named(key, name))


def whole_space_named(key: str | int, name: str) -> Space:
    """The same, with all that has come to be set in it: code is about to use it."""
    found = space_named(key, name)
    if found.foreign and load_into is not None:
        load_into(key)
    return found


def _space_named(key: str | int, name: str) -> Space:
    with lock:
        if is_main(key):
            main = main_module()
            assert main is not None
            return space_of(main.__dict__)
        found = _spaces_by_key.get(key)
        if found is None:
            names: dict[str, Any] = {"__name__": name, "__builtins__": __builtins__}
            found = _spaces_by_key[key] = _spaces[id(names)] = Space(key, names, foreign=True)
            names[_OWN] = found  # functions hold their globals, and nothing else of it
        return found


def global_of(space: Space, name: str, user: str) -> Global:
    """A name that code refers to."""
    found = space.globals.get(name)
    if found is None:
        found = space.globals.setdefault(name, Global(space, name, user))
    return found
