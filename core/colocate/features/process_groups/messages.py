"""Messages of process groups: the first three go to workers, the others come from workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

# By name of a process group: the number of operations begun, and the number of ranks.
Operations: TypeAlias = "Mapping[str, tuple[int, int]]"


class Told(NamedTuple):
    """A rank's report on process groups: after a failure, back in a hold, or after a call. Sent as a tuple."""

    updates: int = 0  # starts and ends of updates of shared weights in the call
    operations: Operations = {}  # operations begun on each process group
    in_step: bool = False  # whether the failed call had begun operations, or raised in a backward pass
    cuts: Sequence[str] = ()  # process groups that the rank has cut
    begins: bool = False  # whether the finished call has begun operations

    def plain(self) -> tuple[Any, ...] | None:
        """Return the wire format; None for an empty report."""
        return tuple(self) if any(self) else None


@message
class Left(Message):
    """Report a rank that begins no further operations during a hold, after a failure or an end of the call."""

    number: int  # of the hold
    slot: int  # of the rank
    operations: Operations  # operations begun on each group


@message
class DropGroups(Message):
    """Ask for a drop of broken process groups, once all ranks are back; answered by `GroupsDropped`."""

    number: int  # of the hold
    names: Sequence[str]  # the groups' names; empty if only roles are to be renewed
    everybody: bool  # whether to renew all roles, not only users of these groups


@message
class Join(Message):
    """Ask a slot for a part in making the default process group."""


@message
class Joining(Message):
    """Announce that a slot is about to make the default process group; the driver asks the others to join."""

    key: str  # the key of the slots' rendezvous


@message
class GroupsDropped(Message):
    """The answer to `DropGroups`, after the roles' renewals. Body: the exception of a role, if it can be sent."""

    number: int  # of the hold
    holders: Sequence[str]  # names of groups that somebody still holds
    failure: Failure | None  # the error of a role's `renew`; None for none

    def head(self) -> Head:
        """Return the wire format of the message."""
        return "GroupsDropped", self.number, self.holders, None if self.failure is None else values(self.failure)

    @classmethod
    def of(cls, *values: Any) -> GroupsDropped:
        """Build the message from the wire format; see `Message.of`."""
        number, holders, failure = values
        return cls(number, holders, None if failure is None else Failure(*failure))
