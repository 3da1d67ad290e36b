"""Identify definitions by ids: classes and functions of this process, and received ones.

An id is unique among all processes, and refers to one object as long as that lives. This module holds weak references
only; the users of an id hold the object (a group holds sent definitions, a worker received ones). No lock is taken: the
main thread registers definitions, too.
"""

from __future__ import annotations

import builtins
import itertools
import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from colocate.errors import ColocateError

_ORIGIN_BITS, _NUMBER_BITS = 64, 32


class Definition(NamedTuple):
    """A class, a function, or another object that the script has a name for, with an id."""

    id: int
    thing: Any


class Name(NamedTuple):
    """A global of the script that code in a body refers to; `user` is that code, for errors."""

    name: str
    user: str


Need: TypeAlias = Definition | Name

_things: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_lasting: dict[int, Any] = {}  # objects without weak references, such as a sentinel with slots
_ids: dict[int, int] = {}  # ids by `id()` of an object; the address may be reused, so `thing_of` decides
_numbers = itertools.count(1)
_origin = secrets.randbits(_ORIGIN_BITS)


def _after_fork() -> None:
    # Ids given by the child must differ from the parent's.
    global _origin
    _origin = secrets.randbits(_ORIGIN_BITS)


os.register_at_fork(after_in_child=_after_fork)


def this_process() -> int:
    """Return the common prefix of all ids given by this process."""
    return _origin


def is_of_this_process(id: int) -> bool:
    return id >> _NUMBER_BITS == _origin


def id_of(thing: Any) -> int:
    """Return the first id of an object; give a new one if the object has none."""
    existing_id = _ids.get(builtins.id(thing))
    if existing_id is not None and thing_of(existing_id) is thing:
        return existing_id
    return note(_origin << _NUMBER_BITS | next(_numbers), thing)


def note(id: int, thing: Any) -> int:
    """Map an id to an object; return the object's first id, which is used for sending."""
    try:
        _things[id] = thing
    except TypeError:
        _lasting[id] = thing
    first = _ids.setdefault(builtins.id(thing), id)  # atomic: of several threads the first one wins
    if thing_of(first) is not thing:  # the address belonged to a dead object
        _ids[builtins.id(thing)] = first = id
    return first


def thing_of(id: int) -> Any:
    """Return the object with this id in this process, or None."""
    thing = _things.get(id)
    return _lasting.get(id) if thing is None else thing


# Hooks that find a missing definition: in received bundles, and on a worker by a request to the driver.
find_arrived: Callable[[int], Any] = thing_of
find_missing: Callable[[int], None] | None = None


def find(id: int) -> Any:
    """Return the object with this id, loading or requesting the definition if missing.

    Raises:
        ColocateError: No process knows the id any more.
    """
    thing = find_arrived(id)
    if thing is None and find_missing is not None:
        find_missing(id)
        thing = find_arrived(id)
    if thing is None:
        raise ColocateError(
            "a value names a class or function of the script that this process doesn't know (any more): the group "
            "that it came from is closed, or another driver has defined it"
        )
    return thing
