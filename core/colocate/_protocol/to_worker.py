"""Messages from a driver to its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from colocate._protocol.message import Head, Message, message

# The place of a call's body within a message's body: an index for bodies that aren't pickled, or the byte range of its
# pickle and the indices of the buffers.
Where: TypeAlias = "int | tuple[int, int, tuple[int, ...]] | None"

# How a large body reaches several workers of other machines: the body's key, the number of workers that fetch the body
# from this one, and the address from which this worker fetches; "" for a body that comes with the message.
Passed: TypeAlias = "tuple[int, int, str]"
PASSED_BYTES = 1 << 20  # bodies of at least this size are forwarded from worker to worker


@message
class Boot(Message):
    """Identify the worker; each driver of a detached pool sends this again. Body: a `Boot` of the executor's.

    A worker of another version answers `Hello` only, and doesn't read the body or any later message.
    """

    protocol: int  # the sender's (`versions.PROTOCOL`)
    version: str  # version of the sender's colocate

    @classmethod
    def of(cls, *values: Any) -> Boot:
        """Build the message from the values of any protocol version."""
        protocol, version, *_ = values if len(values) >= 2 else (0, "")
        return cls(protocol, version)


@message
class Define(Message):
    """Definitions, sent before the first message that names them, by drivers and workers. Body: a bundle."""

    ids: Sequence[int]  # ids of the classes and functions
    names: Sequence[str]  # the script's globals in the bundle


@message
class Build(Message):
    """Construct the roles of the slot. Body: a list of `RoleBuild`."""

    generation: int  # how often the group has been restarted
    slots: int  # how many slots the group has
    collective_timeout: float  # timeout of a process group's operations, in seconds
    given: Mapping[str, Any]  # settings of features before roles exist, by feature (`OfGroup.gives`)
    parts: Mapping[str, Any]  # initial state of features, by feature (`OfGroup.starts`)
    background: Sequence[str] = ()  # the roles with a lane of their own


@message
class Call(Message):
    """Call a method. Body: the arguments by name; none without arguments.

    Attributes:
        seq: Position in the group's order.
        role: The role's name; two numbers for a function, slots and seed.
        method: The method's name.
        keep: The key of the resident for the result; None for a result that is sent.
        valid: Number of rows that aren't padding; None if nothing was scattered, or only the rank knows.
        uses: Whether there are residents among the arguments.
        frees: Residents that are no longer needed.
        observed: Whether to note received residents (`Done.taken`).
        passed: How the body arrives, for a body that workers forward.
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
        """The calls of the message."""
        return (self,)


@message
class Batch(Message):
    """Several calls. Body: the bodies of the calls as one (`_protocol.bundle`)."""

    frees: Sequence[int]  # residents that are no longer needed
    calls: Sequence[tuple[Call, Where]]  # the calls, and the place of each call's body
    passed: Passed | None = None  # see `Call`

    @property
    def numbered(self) -> Sequence[Call]:
        return [call for call, _ in self.calls]

    def head(self) -> Head:
        return "Batch", self.frees, [(call.head(), where) for call, where in self.calls], self.passed

    @classmethod
    def of(cls, *values: Any) -> Batch:
        frees, calls, passed = values
        return cls(frees, [(Call(*head[1:]), where) for head, where in calls], passed)


@message
class Free(Message):
    """Free residents that are no longer needed."""

    keys: Sequence[int]  # the residents


@message
class Hold(Message):
    """Stop a lane after a failed call: begin no call from that one on, and report when all earlier calls have ended."""

    number: int  # the hold's number; the lane's highest number counts
    failed: int  # the failed call; 0 for the construction of the roles
    cut: bool  # whether to interrupt calls that wait for other ranks, too
    lane: str = ""  # the background role of the lane; "" for the main lane


@message
class Resume(Message):
    """Continue after a hold, without the withdrawn calls: all ranks are back."""

    number: int  # the finished hold
    withdrawn: Sequence[int]  # calls to drop
    lane: str = ""  # see `Hold`


@message
class Unwanted(Message):
    """Cancel a call that nobody waits for: `ctx.cancelled` becomes true, and awaits are cancelled."""

    seq: int  # the call


@message
class Stop(Message):
    """Begin no more calls: the group is about to close."""


@message
class Withdraw(Message):
    """Pause a call that hasn't begun until `Decided`; answered by `CanWithdraw`."""

    token: int  # the question's number
    seq: int  # the call
    lane: str = ""  # see `Hold`


@message
class Decided(Message):
    """Decide on a paused call."""

    token: int  # the question's number
    seq: int  # the call
    drop: bool  # whether to drop the call; otherwise the call runs, and nobody waits for the result
    lane: str = ""  # see `Hold`


@message
class AskStack(Message):
    """Request a description of the lanes' work; answered by `Stack`."""

    token: int  # the question's number


@message
class Fetch(Message):
    """Request the part of a resident; answered by `Fetched`."""

    token: int  # the question's number
    key: int  # the resident
    contents: bool  # whether to send the part itself, or only its structure


@message
class Listen(Message):
    """Listen for other workers; answered by `Address`."""


@message
class Answer(Message):
    """The driver's answer to an `Ask`."""

    token: int  # the question's number
    answer: Any  # the answer
    error: str | None  # the error, if there is no answer


@message
class Close(Message):
    """Exit after the running calls."""

    reason: str  # the reason, for calls that wait for other workers
