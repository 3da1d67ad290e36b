"""Definitions by id: the classes and functions of this process that were named, and those that others have sent.

An id is unique among all processes, and leads to one object, for as long as that exists. Nobody holds it here: whoever
may hear of a definition again does (a group what it has sent, a worker what has come). No lock is taken for that: the
main thread names definitions, too.
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
    """A class or function, or what else a script's name stands for, and its id."""

    id: int
    thing: Any


class Name(NamedTuple):
    """A global of the script that code in a body refers to; `user` is that code, for errors."""

    name: str
    user: str


Need: TypeAlias = Definition | Name

_things: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_lasting: dict[int, Any] = {}  # what can't be referred to weakly: a sentinel with slots
_ids: dict[int, int] = {}  # by id() of an object, which another one may have by now: `thing_of` says whether it is that
_numbers = itertools.count(1)
_origin = secrets.randbits(_ORIGIN_BITS)


def _after_fork() -> None:
    # What the child defines from now on is its own.
    global _origin
    _origin = secrets.randbits(_ORIGIN_BITS)


os.register_at_fork(after_in_child=_after_fork)


def this_process() -> int:
    """Return what the ids have in common that this process gives."""
    return _origin


def is_of_this_process(id: int) -> bool:
    """Return whether this process has given an id."""
    return id >> _NUMBER_BITS == _origin


def id_of(thing: Any) -> int:
    """Return the first id of an object of this process; it has one from now on."""
    found = _ids.get(builtins.id(thing))
    if found is not None and thing_of(found) is thing:
        return found
    return note(_origin << _NUMBER_BITS | next(_numbers), thing)


def note(id: int, thing: Any) -> int:
    """Have an id lead to an object; the object's first id, by which it goes out."""
    try:
        _things[id] = thing
    except TypeError:
        _lasting[id] = thing
    first = _ids.setdefault(builtins.id(thing), id)  # whichever thread is first
    if thing_of(first) is not thing:  # what was there before it
        _ids[builtins.id(thing)] = first = id
    return first


def thing_of(id: int) -> Any:
    """Return what has this id here; None where nothing has."""
    found = _things.get(id)
    return _lasting.get(id) if found is None else found


# How this process comes by a definition that it lacks: from a bundle that has come, and a worker asks its driver.
find_arrived: Callable[[int], Any] = thing_of
find_missing: Callable[[int], None] | None = None


def find(id: int) -> Any:
    """Return what has this id, here or at whoever can be asked.

    Raises:
        ColocateError: Nobody knows it any more.
    """
    found = find_arrived(id)
    if found is None and find_missing is not None:
        find_missing(id)
        found = find_arrived(id)
    if found is None:
        raise ColocateError(
            "a value names a class or function of the script that this process doesn't know (any more): the group "
            "that it came from is closed, or another driver has defined it"
        )
    return found
