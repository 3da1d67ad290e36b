"""What a message is: one class for each, of which a tuple of plain builtins travels, its head.

Beside it there is often a body, which has been packed by itself. Only in this package a head's items are known by their
places.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast, dataclass_transform

import attrs

from colocate import features

Head: TypeAlias = tuple[Any, ...]

_kinds: dict[str, Callable[..., Message]] = {}  # what makes one of the values that travel
_values: dict[type[Message], Callable[[Message], Head]] = {}

_M = TypeVar("_M", bound="type[Message]")


class Message:
    """One message, without its body."""

    __slots__ = ()

    def head(self) -> Head:
        """Return what travels of it."""
        return type(self).__name__, *_values[type(self)](self)

    # For all of them: to write these anew for each class takes a tenth of all that a driver imports.

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Message) and values(self) == values(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}{values(self)!r}"

    @classmethod
    def of(cls, *values: Any) -> Message:
        """Return the message of such values, in the order in which they travel; where they aren't the very fields."""
        return cls(*values)


def values(message: Message) -> Head:
    """Return what it says, in the order of its fields."""
    return _values[type(message)](message)


def kind_of(head: Head) -> object:
    """Return what a head says that it is, whatever version has made it."""
    return head[0]


def read(head: Head | Message) -> Message:
    """Return the message of a head; within one process it is handed over as it is."""
    if isinstance(head, Message):
        return head
    made = _kinds.get(head[0])
    if made is None:  # one of a feature's that wasn't here yet
        features.of_message(head[0])
        made = _kinds[head[0]]
    return made(*head[1:])


@dataclass_transform(frozen_default=True)
def message(cls: _M) -> _M:
    """Make a class of fields one of messages; its name is what its heads begin with."""
    # Not frozen but for type checkers: that takes a microsecond more for each.
    made: Any = attrs.define(cls, eq=False, repr=False)
    names = [field.name for field in attrs.fields(made)]
    if len(names) > 1:
        _values[made] = operator.attrgetter(*names)
    else:
        _values[made] = lambda message: tuple(getattr(message, name) for name in names)
    # Of one module again where its first import was interrupted, by a signal's handler say.
    known = _kinds.get(made.__name__, made)
    assert known.__module__ == made.__module__, f"two messages are called {made.__name__}"
    _kinds[made.__name__] = made.of if "of" in vars(made) else made
    return cast("_M", made)
