"""What a worker asks its driver, within `from_worker.Ask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Message, message


@message
class WhereIs(Message):
    """Where another worker is reached.

    Attributes:
        group: Its group's name.
        slot: Its slot in that.
        generation: That of the group.
    """

    group: str
    slot: int
    generation: int


@message
class Aligned(Message):
    """Which residents that a call uses have the partition of the first, once all of them are made.

    Attributes:
        seq: The call.
        key: The first.
        others: The others.
    """

    seq: int
    key: int
    others: Sequence[int]


@message
class Missing(Message):
    """Send a definition that came here by name from another worker.

    Attributes:
        id: The definition's.
    """

    id: int


@message
class Source(Message):
    """The source of a module that lies beside the script, and of what that imports.

    Attributes:
        module: Its name.
    """

    module: str


@message
class Compare(Message):
    """Whether the driver has the modules that were imported here early, with other content.

    Attributes:
        modules: File and digest, by name.
    """

    modules: Mapping[str, tuple[str, str]]


@message
class HeardAll(Message):
    """Whether all that was said before has been heard: the answer comes after that."""


@message
class Meet(Message):
    """Wait for the other ranks, and have what one of them has brought.

    Attributes:
        board: What they meet for.
        members: How many they are.
        value: What this one brings; None for nothing.
        joins: Whether those that don't come by themselves are told to (`Join`).
        refusal: Why this one can't come, which all of them are told.
    """

    board: str
    members: int
    value: Any
    joins: bool
    refusal: str | None
