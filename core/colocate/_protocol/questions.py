"""Questions of a worker to its driver, inside `from_worker.Ask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Message, message


@message
class WhereIs(Message):
    """Ask for the address of another worker."""

    group: str  # the group's name
    slot: int  # the worker's slot in the group
    generation: int  # the group's generation
    number: int  # the group's number: a later group may have the same name


@message
class Aligned(Message):
    """Ask which residents of a call have the partition of the first resident, once all are made."""

    seq: int  # the call
    key: int  # the first resident
    others: Sequence[int]  # the other residents


@message
class Missing(Message):
    """Request a definition that another worker has sent by name only."""

    id: int  # the definition's id


@message
class Source(Message):
    """Request the source of a module beside the script, and the sources of the module's imports."""

    module: str  # the module's name


@message
class Compare(Message):
    """Ask whether the driver's versions of early imported modules have other content."""

    modules: Mapping[str, tuple[str, str]]  # file and digest, by name


@message
class HeardAll(Message):
    """Barrier: answered after all earlier messages were handled."""


@message
class Meet(Message):
    """Wait for the other ranks, and receive the value that one rank has brought."""

    rendezvous_key: str  # key of the rendezvous
    members: int  # number of ranks
    value: Any  # this rank's value; None for no value
    refusal: str | None  # why this rank refuses, for all ranks
