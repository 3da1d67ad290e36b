"""What workers ask each other: parts of residents."""

from __future__ import annotations

from typing import Any

from colocate._protocol.message import Message, message


@message
class Part(Message):
    """The whole part; answered by `Value`, or `Elsewhere` where one of the same machine has asked before."""

    key: int  # the resident
    place: str = ""  # where whoever asks computes, when memory of a device may be lent there; otherwise ""
    over: tuple[int, bool] | None = None  # what whoever asks has taken before, and whether it keeps that; see `Took`
    here: tuple[str, str] | None = None  # machine and address of whoever asks from another one, and may pass it on
    lacking: int = 0  # of an `Elsewhere` where it wasn't to be had, its `times`


@message
class Slice(Message):
    """Ask for some rows of a value; answered by `Value`."""

    key: int  # the resident
    start: int  # the first row
    stop: int  # the one after the last
    place: str = ""  # see `Part`


@message
class Rows(Message):
    """How many rows it has; answered by `Number`."""

    key: int  # the resident


@message
class Still(Message):
    """Whether it is still what it was, having been lent; answered by `Number`, with None when it isn't."""

    key: int  # the resident


@message
class Weight(Message):
    """How many rows the call that made it worked on; answered by `Number`."""

    key: int  # the resident


@message
class Took(Message):
    """Whoever asks has taken it; answered by `Number`. When all have who are to, it is forgotten."""

    key: int  # the resident
    keeps: bool = False  # whether it is kept there


@message
class Passed(Message):
    """The body of a message of the driver's, which whoever is asked passes on; answered by `Value`."""

    key: int  # the body


@message
class Shared(Message):
    """A part of a resident of another machine; answered by `Value`, or by `Number` where it isn't here (any more)."""

    who: tuple[str, int, int, int]  # who has it, as `WhereIs` says it
    key: int  # the resident


@message
class Elsewhere(Message):
    """Ask that one, by `Shared`: it has it, or is just getting it."""

    address: str  # where it is reached
    times: int  # how often whoever has asked from there was given it to share


@message
class Value(Message):
    """Here it is. Body: it."""

    waited: float  # how many seconds the question has waited for it to be made
    lent: int = 0  # how many bytes are to be copied from where they are, and asked for then with `Still`
    refusal: str = ""  # why no more is lent, though it might be; "" where nothing was in the way
    shared: bool = False  # whether others of the machine will be told to ask there


@message
class Number(Message):
    """So many."""

    number: int | None  # how many; None when it isn't counted


@message
class Poison(Message):
    """Tell that a value can't be used."""

    why: str  # what kept it from being made, or wrote into it


@message
class Unsendable(Message):
    """Tell that a value can't be packed."""

    text: str  # what the `SerializationError` says
    argument: Any  # its `argument`
    path: Any  # its `path`
