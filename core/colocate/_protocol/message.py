"""The base class of all messages. The wire format of a message is a tuple of plain builtins, the head.

A message often has a body, which is packed separately. Only this package reads a head's items by position.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast, dataclass_transform

import attrs

from colocate import features

Head: TypeAlias = tuple[Any, ...]

_kinds: dict[str, Callable[..., Message]] = {}  # Constructors that take wire values, by message name.
_values: dict[type[Message], Callable[[Message], Head]] = {}

_M = TypeVar("_M", bound="type[Message]")


class Message:
    """A message, without the separately packed body."""

    __slots__ = ()

    def head(self) -> Head:
        """Return the wire format of the message."""
        return type(self).__name__, *_values[type(self)](self)

    # Defined once for all messages, because generated methods would cost a tenth of a driver's import time.

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Message) and values(self) == values(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}{values(self)!r}"

    @classmethod
    def from_values(cls, *values: Any) -> Message:
        """Build a message from wire values. Override for messages whose wire values differ from the fields."""
        return cls(*values)


def values(message: Message) -> Head:
    return _values[type(message)](message)


def kind_of(head: Head) -> object:
    """Return the message name in a head, of any protocol version."""
    return head[0]


def decode_head(head: Head | Message) -> Message:
    """Build the message from a head. Within one process a message itself is passed, and returned unchanged."""
    if isinstance(head, Message):
        return head
    factory = _kinds.get(head[0])
    if factory is None:  # The message belongs to a feature that isn't imported yet.
        features.import_messages(head[0])
        factory = _kinds[head[0]]
    return factory(*head[1:])


@dataclass_transform(frozen_default=True)
def message(cls: _M) -> _M:
    """Turn a class with annotated fields into a message class. A head is the class name, followed by the fields."""
    # Only type checkers treat the class as frozen, because a frozen class costs a microsecond per message.
    message_class: Any = attrs.define(cls, eq=False, repr=False)
    names = [field.name for field in attrs.fields(message_class)]
    if len(names) > 1:
        _values[message_class] = operator.attrgetter(*names)
    else:
        _values[message_class] = lambda message: tuple(getattr(message, name) for name in names)
    # A module is imported again if a signal handler has interrupted the first import.
    existing = _kinds.get(message_class.__name__, message_class)
    assert existing.__module__ == message_class.__module__, f"two messages are called {message_class.__name__}"
    _kinds[message_class.__name__] = (
        message_class.from_values if "from_values" in vars(message_class) else message_class
    )
    return cast("_M", message_class)
