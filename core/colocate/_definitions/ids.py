"""Assign ids to definitions, which are classes and functions of this process, or received from other processes.

An id is unique among all processes, and refers to one object for the object's lifetime. This module only holds weak
references. Users of an id keep the object alive: a group keeps sent definitions, and a worker keeps received ones. The
functions take no lock, because the main thread registers definitions, too.
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
    """A class, function or other object with a name in the script, paired with an id."""

    id: int
    thing: Any


class Name(NamedTuple):
    """A global variable of the script that code in a message uses. `user` names the code in error texts."""

    name: str
    user: str


Need: TypeAlias = Definition | Name

_things: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_lasting: dict[int, Any] = {}  # Holds objects that can't be weakly referenced, as with `__slots__`.
# Maps the address of an object (`id()`) to a definition's id. Addresses are reused, so callers check `get_thing`.
_ids: dict[int, int] = {}
_numbers = itertools.count(1)
_origin = secrets.randbits(_ORIGIN_BITS)


def _after_fork() -> None:
    # Ids that a forked child assigns must differ from the parent's ids.
    global _origin
    _origin = secrets.randbits(_ORIGIN_BITS)


os.register_at_fork(after_in_child=_after_fork)


def get_origin() -> int:
    """Return the common prefix of all ids that this process assigns."""
    return _origin


def is_of_this_process(id: int) -> bool:
    return id >> _NUMBER_BITS == _origin


def get_id(thing: Any) -> int:
    """Return an object's id for sending; assign a new id if the object has none."""
    existing_id = _ids.get(builtins.id(thing))
    if existing_id is not None and get_thing(existing_id) is thing:
        return existing_id
    return register_id(_origin << _NUMBER_BITS | next(_numbers), thing)


def register_id(id: int, thing: Any) -> int:
    """Register an object under an id; return the object's first id, which is used for sending."""
    try:
        _things[id] = thing
    except TypeError:
        _lasting[id] = thing
    first = _ids.setdefault(builtins.id(thing), id)  # `setdefault` is atomic, so the first thread wins.
    if get_thing(first) is not thing:  # The address belonged to an object that no longer exists.
        _ids[builtins.id(thing)] = first = id
    return first


def get_thing(id: int) -> Any:
    """Return the object with this id in this process, or None."""
    thing = _things.get(id)
    return _lasting.get(id) if thing is None else thing


# The module `bundles` replaces this hook by a search of received bundles.
find_arrived: Callable[[int], Any] = get_thing
# This hook requests a missing definition from the driver; only workers have one.
find_missing: Callable[[int], None] | None = None


def find_thing(id: int) -> Any:
    """Return the object with this id; load or request the definition if necessary.

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
