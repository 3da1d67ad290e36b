"""What a worker asks its driver, within `from_worker.Ask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Message, message


@message
class WhereIs(Message):
    """Where another worker is reached."""

    group: str  # its group's name
    slot: int  # its slot in that
    generation: int  # that of the group
    number: int  # that of the group: one that comes later may have its name


@message
class Aligned(Message):
    """Which residents that a call uses have the partition of the first, once all of them are made."""

    seq: int  # the call
    key: int  # the first
    others: Sequence[int]  # the others


@message
class Missing(Message):
    """Send a definition that came here by name from another worker."""

    id: int  # the definition's


@message
class Source(Message):
    """The source of a module that lies beside the script, and of what that imports."""

    module: str  # its name


@message
class Compare(Message):
    """Whether the driver has the modules that were imported here early, with other content."""

    modules: Mapping[str, tuple[str, str]]  # file and digest, by name


@message
class HeardAll(Message):
    """Whether all that was said before has been heard: the answer comes after that."""


@message
class Meet(Message):
    """Wait for the other ranks, and have what one of them has brought."""

    rendezvous_key: str  # what they meet for
    members: int  # how many they are
    value: Any  # what this one brings; None for nothing
    refusal: str | None  # why this one can't come, which all of them are told
