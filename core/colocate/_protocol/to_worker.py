"""What a driver says to its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from colocate._protocol.message import Head, Message, message

# Where in a message's body the one of a call lies: the index, where bodies are handed over as they are, or the range
# of bytes of its pickle and the buffers that it refers to.
Where: TypeAlias = "int | tuple[int, int, tuple[int, ...]] | None"

# How a large body gets to several workers of other machines: its key, how many workers take it from who gets this, and
# where this one takes it from; "" where it comes with the message.
Passed: TypeAlias = "tuple[int, int, str]"
PASSED_BYTES = 1 << 20  # from here on it is passed on


@message
class Boot(Message):
    """Who it is; a detached pool's worker is told again by each driver. Body: a `Boot` of the executor's.

    A worker of another version answers `Hello`, and nothing else: it doesn't read the body, nor what follows.
    """

    protocol: int  # of who says it (`versions.PROTOCOL`)
    version: str  # its colocate's version

    @classmethod
    def of(cls, *values: Any) -> Boot:
        """As `Message.of`, of any version."""
        protocol, version, *_ = values if len(values) >= 2 else (0, "")
        return cls(protocol, version)


@message
class Define(Message):
    """Definitions, before the first message that names them; the worker, too, says this of its own. Body: a bundle."""

    ids: Sequence[int]  # those of the classes and functions
    names: Sequence[str]  # the globals of the script that it sets


@message
class Build(Message):
    """Construct the roles of the slot. Body: a list of `RoleBuild`."""

    generation: int  # how often the group has been restarted
    slots: int  # how many slots the group has
    collective_timeout: float  # how long an operation of a process group may take, in seconds
    given: Mapping[str, Any]  # what features say before there are roles, by feature (`OfGroup.gives`)
    parts: Mapping[str, Any]  # what features say of how they begin, by feature (`OfGroup.starts`)
    background: Sequence[str] = ()  # the roles that have a lane of their own


@message
class Call(Message):
    """Call a method. Body: its arguments by name; none without any.

    Attributes:
        seq: Its place in the group's order.
        role: The role's name; two numbers for a function, slots and seed.
        method: The method's name.
        keep: The key of the resident that its result becomes; None when that is sent.
        valid: How many rows aren't padding; None when nothing was scattered, or only the rank knows.
        uses: Whether there are residents among the arguments.
        frees: Residents that nobody needs any more.
        observed: Whether somebody wants to know what it is given of residents (`Done.taken`).
        passed: How its body comes, where workers pass it on.
    """

    seq: int
    role: Any
    method: str
    keep: int | None
    valid: int | None
    uses: bool
    frees: Sequence[int]
    observed: bool = False
    passed: Passed | None = None

    @property
    def numbered(self) -> Sequence[Call]:
        """The calls in it."""
        return (self,)


@message
class Batch(Message):
    """Several calls. Body: theirs, as one (`_protocol.bundle`)."""

    frees: Sequence[int]  # residents that nobody needs any more
    calls: Sequence[tuple[Call, Where]]  # the calls, and where in the body each has its own
    passed: Passed | None = None  # see `Call`

    @property
    def numbered(self) -> Sequence[Call]:
        """The calls in it."""
        return [call for call, _ in self.calls]

    def head(self) -> Head:
        """Return what travels of it."""
        return "Batch", self.frees, [(call.head(), where) for call, where in self.calls], self.passed

    @classmethod
    def of(cls, *values: Any) -> Batch:
        """As `Message.of`."""
        frees, calls, passed = values
        return cls(frees, [(Call(*head[1:]), where) for head, where in calls], passed)


@message
class Free(Message):
    """Nobody needs some residents any more."""

    keys: Sequence[int]  # theirs


@message
class Hold(Message):
    """A call has failed somewhere: begin no call of its lane from it on, and say when nothing before it runs there."""

    number: int  # the hold's number; the highest one of the lane counts
    failed: int  # the call; 0 for the construction of the roles
    cut: bool  # whether to free those that wait for other ranks, too
    lane: str = ""  # the background role whose lane that is; "" for the main one


@message
class Resume(Message):
    """All ranks are back: go on, but for some calls."""

    number: int  # the hold that is over
    withdrawn: Sequence[int]  # calls that are dropped
    lane: str = ""  # see `Hold`


@message
class Unwanted(Message):
    """Nobody waits for a call any more: it ends as soon as it can (`ctx.cancelled`; what it awaits is cancelled)."""

    seq: int  # the call


@message
class Stop(Message):
    """The group is about to close: begin nothing any more."""


@message
class Withdraw(Message):
    """Hold a call up, if it hasn't begun, until it is `Decided`; answered by `CanWithdraw`."""

    token: int  # the question's number
    seq: int  # the call
    lane: str = ""  # see `Hold`


@message
class Decided(Message):
    """What becomes of a call that was held up."""

    token: int  # the question's number
    seq: int  # the call
    drop: bool  # whether it is dropped; it goes on otherwise, and nobody waits for it
    lane: str = ""  # see `Hold`


@message
class AskStack(Message):
    """Say what the lane does; answered by `Stack`."""

    token: int  # the question's number


@message
class Fetch(Message):
    """Send the part of a resident; answered by `Fetched`."""

    token: int  # the question's number
    key: int  # the resident
    contents: bool  # whether the part itself is wanted, or only its structure


@message
class Listen(Message):
    """Other workers want to reach this one; answered by `Address`."""


@message
class Answer(Message):
    """What the driver says to an `Ask`."""

    token: int  # the question's number
    answer: Any  # the answer
    error: str | None  # why there is none


@message
class Close(Message):
    """End after what runs now."""

    reason: str  # what waits for other workers is told
