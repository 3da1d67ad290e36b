"""What driver and workers say of process groups: the first three to workers, the others from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from colocate._protocol.from_worker import Failure
from colocate._protocol.message import Head, Message, message, values

# How many operations were begun on each process group, and of how many ranks that is, by the group's name.
Operations: TypeAlias = "Mapping[str, tuple[int, int]]"


class Told(NamedTuple):
    """What goes along as a rank fails, is back in a hold, or has done a call; as a plain tuple."""

    updates: int = 0  # beginnings and ends of updates of weights that it shares with other ranks, in the call
    operations: Operations = {}  # how many it has begun on each process group
    in_step: bool = False  # whether it has begun some in the call that failed, or that has raised in a backward pass
    cuts: Sequence[str] = ()  # process groups that it has cut
    begins: bool = False  # whether it has begun some in the call that is done

    def plain(self) -> tuple[Any, ...] | None:
        """Return it as it travels; None where it says nothing."""
        return tuple(self) if any(self) else None


@message
class Left(Message):
    """During a hold: a rank has failed, or is back, and begins no operation of a process group any more."""

    number: int  # the hold's
    slot: int  # the rank's
    operations: Operations  # how many it had begun on each group


@message
class DropGroups(Message):
    """All ranks are back, and some process groups are of no use any more: drop them; answered by `GroupsDropped`."""

    number: int  # the hold's
    names: Sequence[str]  # the groups'; none where only roles are to be told
    everybody: bool  # all roles are told, not only those that have to do with these groups


@message
class Join(Message):
    """Another slot needs the default process group: do this one's part in making it."""


@message
class Joining(Message):
    """The slot is about to make the default process group: the others are told to, the first time."""

    key: str  # what the slots meet under


@message
class GroupsDropped(Message):
    """Some process groups are dropped, and roles have been told. Body: what one of them raised, if it can be sent."""

    number: int  # the hold's
    holders: Sequence[str]  # groups that somebody still holds, by name
    failure: Failure | None  # what a role's `renew` raised

    def head(self) -> Head:
        """Return what travels of it."""
        return "GroupsDropped", self.number, self.holders, None if self.failure is None else values(self.failure)

    @classmethod
    def of(cls, *values: Any) -> GroupsDropped:
        """As `Message.of`."""
        number, holders, failure = values
        return cls(number, holders, None if failure is None else Failure(*failure))
