"""Messages about process groups. `LeftGroups`, `DropGroups` and `JoinDefault` go to workers, others to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

# The number of started operations and the number of ranks, by the name of a process group.
Operations: TypeAlias = "Mapping[str, tuple[int, int]]"


class RankReport(NamedTuple):
    """A rank's report on process groups, sent as a tuple after a call, after a failure, and during a hold."""

    updates: int = 0  # The number of started plus ended updates of shared weights in the call.
    operations: Operations = {}  # The operations started on each process group.
    in_step: bool = False  # Whether the failed call had started operations, or raised in a backward pass.
    cuts: Sequence[str] = ()  # The names of process groups that the rank has cut.
    begins: bool = False  # Whether the finished call has started operations.

    def encode(self) -> tuple[Any, ...] | None:
        """Return the report in the wire format, or None for an empty report."""
        return tuple(self) if any(self) else None


@message
class LeftGroups(Message):
    """The driver's notification that a rank starts no further operations until the hold ends."""

    number: int  # The number of the hold.
    slot: int  # The slot of the rank.
    operations: Operations  # The operations that the rank has started on each group.


@message
class DropGroups(Message):
    """The driver's request to drop broken process groups and to renew roles, answered by `GroupsDropped`."""

    number: int  # The number of the hold.
    names: Sequence[str]  # The names of the broken groups; empty if roles are only to be renewed.
    everybody: bool  # Whether to renew all roles, not only users of the broken groups.


@message
class JoinDefault(Message):
    """The driver's request to a slot to take part in making the default process group."""


@message
class DefaultStarted(Message):
    """A worker's notification that a slot starts to make the default process group. All other slots must join."""

    key: str  # The key of the slots' rendezvous.


@message
class GroupsDropped(Message):
    """The answer to `DropGroups` after roles were renewed. The body is a failed role's exception, if serializable."""

    number: int  # The number of the hold.
    holders: Sequence[str]  # The names of dropped groups that role code still refers to.
    failure: Failure | None  # The error of a role's `renew`, or None.

    def head(self) -> Head:
        """Return this message in the wire format."""
        return "GroupsDropped", self.number, self.holders, None if self.failure is None else values(self.failure)

    @classmethod
    def from_values(cls, *values: Any) -> GroupsDropped:
        """Return the message for values from the wire; see `Message.from_values`."""
        number, holders, failure = values
        return cls(number, holders, None if failure is None else Failure(*failure))
