"""What workers ask each other: parts of residents."""

from __future__ import annotations

from typing import Any

from colocate._protocol.message import Message, message


@message
class Part(Message):
    """The whole part; answered by `Value`.

    Attributes:
        key: The resident.
        place: Where whoever asks computes, when memory of a device may be lent there; otherwise "".
    """

    key: int
    place: str = ""


@message
class Slice(Message):
    """Some of its rows; answered by `Value`.

    Attributes:
        key: The resident.
        start: The first row.
        stop: The one after the last.
        place: See `Part`.
    """

    key: int
    start: int
    stop: int
    place: str = ""


@message
class Rows(Message):
    """How many rows it has; answered by `Number`.

    Attributes:
        key: The resident.
    """

    key: int


@message
class Still(Message):
    """Whether it is still what it was, having been lent; answered by `Number`, with None when it isn't.

    Attributes:
        key: The resident.
    """

    key: int


@message
class Weight(Message):
    """How many rows the call that made it worked on; answered by `Number`.

    Attributes:
        key: The resident.
    """

    key: int


@message
class Value(Message):
    """Here it is. Body: it.

    Attributes:
        waited: How many seconds the question has waited for it to be made.
        lent: How many bytes are to be copied from where they are, and asked for then with `Still`.
        refusal: Why no more is lent, though it might be; "" where nothing was in the way.
    """

    waited: float
    lent: int = 0
    refusal: str = ""


@message
class Number(Message):
    """So many.

    Attributes:
        number: How many; None when it isn't counted.
    """

    number: int | None


@message
class Poison(Message):
    """It can't be used.

    Attributes:
        why: What kept it from being made, or wrote into it.
    """

    why: str


@message
class Unsendable(Message):
    """It can't be packed.

    Attributes:
        text: What the `SerializationError` says.
        argument: Its `argument`.
        path: Its `path`.
    """

    text: str
    argument: Any
    path: Any
