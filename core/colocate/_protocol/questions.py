"""Questions of a worker to the driver, sent inside `from_worker.Ask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Message, message


@message
class GetPeerAddress(Message):
    """Ask for the address of another worker."""

    group: str
    slot: int  # The worker's slot in the group.
    generation: int
    number: int  # The group's number, because a later group may have the same name.


@message
class FindAligned(Message):
    """Ask which residents of a call have the same partition as the first resident, once all residents are made."""

    seq: int  # Number of the call.
    key: int  # Key of the first resident.
    other_keys: Sequence[int]  # Keys of the other residents.


@message
class MissingParts(Message):
    """Request a definition that another worker has sent by name only."""

    id: int


@message
class Source(Message):
    """Request the source of a module next to the user's script, and the sources of the module's imports."""

    module: str


@message
class Compare(Message):
    """Ask whether modules that this worker imported early have the same content as on the driver."""

    modules: Mapping[str, tuple[str, str]]  # File and digest of each module, by name.


@message
class Flush(Message):
    """Ask for an answer after the driver has handled all earlier messages, as a barrier."""


@message
class JoinRendezvous(Message):
    """Wait for the other ranks at a rendezvous, and receive the value that one rank contributes."""

    rendezvous_key: str
    members: int  # Number of ranks at the rendezvous.
    value: Any  # The value from this rank; None for no value.
    refusal: str | None  # Reason why this rank refuses, which all ranks get.
