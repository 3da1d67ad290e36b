"""Messages from a driver to its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from colocate._protocol.message import Head, Message, message

# The place of a call's body in the message's body: an index, or the pickle's byte range and the buffers' indices.
Where: TypeAlias = "int | tuple[int, int, tuple[int, ...]] | None"

# The route of a large body: the body's key, how many workers fetch from this worker, and the address to fetch from.
# The address is "" for a body that comes with the message.
Passed: TypeAlias = "tuple[int, int, str]"
PASSED_BYTES = 1 << 20  # Bodies of at least this size are forwarded from worker to worker.


@message
class Boot(Message):
    """Identify the worker, as the first message of each driver. The body is an `executor.Boot`.

    A worker of another version answers `Hello` only, and doesn't read the body or any later message.
    """

    protocol: int  # Protocol version of the sender (`versions.PROTOCOL`).
    version: str  # Version of the sender's colocate.

    @classmethod
    def from_values(cls, *values: Any) -> Boot:
        """Build the message from the values of any protocol version."""
        protocol, version, *_ = values if len(values) >= 2 else (0, "")
        return cls(protocol, version)


@message
class Define(Message):
    """Send a bundle of definitions (the body), before the first message that uses one of the definitions."""

    ids: Sequence[int]  # Ids of the classes and functions.
    names: Sequence[str]  # Names of the script's globals among the definitions.


@message
class Build(Message):
    """Construct the roles of the slot. The body is a list of `RoleBuild`."""

    generation: int  # Number of restarts of the group.
    slots: int  # Number of slots of the group.
    collective_timeout: float  # Timeout of a process group's operations, in seconds.
    configs: Mapping[str, Any]  # Settings of features before roles exist, by feature (`GroupFeature.worker_config`).
    parts: Mapping[str, Any]  # Initial state of features, by feature (`GroupFeature.ready_configs`).
    background: Sequence[str] = ()  # Names of the roles with a lane of their own.


@message
class Call(Message):
    """Call a method. The body has the arguments by name; a call without arguments has no body.

    Attributes:
        seq: Position in the group's order.
        role: The role's name; for a function, the number of slots and the seed.
        method: The method's name.
        keep: The key of the resident for the result; None for a result that is sent.
        valid: Number of rows that aren't padding; None if nothing was scattered, or only the rank knows.
        uses: Whether there are residents among the arguments.
        frees: Residents that are no longer needed.
        observed: Whether to note received residents (`CallEnded.receipts`).
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
        """The calls in the message, each with a number in the group's order."""
        return (self,)


@message
class Batch(Message):
    """Several calls in one message. The body packs the bodies of all calls (`_protocol.bundle`)."""

    frees: Sequence[int]  # Keys of residents that are no longer needed.
    calls: Sequence[tuple[Call, Where]]  # Each call, with the place of the call's body.
    passed: Passed | None = None  # Route of the body, if workers forward the body.

    @property
    def numbered(self) -> Sequence[Call]:
        return [call for call, _ in self.calls]

    def head(self) -> Head:
        return "Batch", self.frees, [(call.head(), where) for call, where in self.calls], self.passed

    @classmethod
    def from_values(cls, *values: Any) -> Batch:
        frees, calls, passed = values
        return cls(frees, [(Call(*head[1:]), where) for head, where in calls], passed)


@message
class Free(Message):
    """Free residents that are no longer needed."""

    keys: Sequence[int]  # Keys of the residents.


@message
class Hold(Message):
    """Stop a lane before the failed call and all later calls. The worker reports when all earlier calls have ended."""

    number: int  # Number of the hold. Only the highest number of a lane counts.
    failed: int  # Number of the failed call; 0 for the construction of the roles.
    cut: bool  # Whether to also interrupt calls that wait for other ranks.
    lane: str = ""  # Background role of the lane; "" for the main lane.


@message
class Resume(Message):
    """Continue after a hold in which all ranks have stopped, without the withdrawn calls."""

    number: int  # Number of the finished hold.
    withdrawn: Sequence[int]  # Numbers of the calls to drop.
    lane: str = ""  # Background role of the lane; "" for the main lane.


@message
class CancelCall(Message):
    """Cancel a call that nobody waits for, by setting `ctx.cancelled` and cancelling awaits."""

    seq: int  # Number of the call.


@message
class Stop(Message):
    """Begin no more calls, because the group is about to close."""


@message
class OfferCancel(Message):
    """Pause a call that hasn't begun, until `CancelDecision` arrives; answered by `CancelVote`."""

    token: int  # Number of the question.
    seq: int  # Number of the call.
    lane: str = ""  # Background role of the lane; "" for the main lane.


@message
class CancelDecision(Message):
    """Drop or release a call that `OfferCancel` has paused."""

    token: int  # Number of the question in `OfferCancel`.
    seq: int  # Number of the call.
    drop: bool  # Whether to drop the call; otherwise the call runs, and its result counts.
    lane: str = ""  # Background role of the lane; "" for the main lane.


@message
class AskStack(Message):
    """Request a description of the lanes' work; answered by `Stack`."""

    token: int  # Number of the question.


@message
class Fetch(Message):
    """Request the part of a resident; answered by `Fetched`."""

    token: int  # Number of the question.
    key: int  # Key of the resident.
    contents: bool  # Whether to send the part itself, or only the structure.


@message
class Listen(Message):
    """Open a listener for other workers; answered by `Address`."""


@message
class Answer(Message):
    """The driver's answer to an `Ask`."""

    token: int  # Number of the answered question.
    answer: Any
    error: str | None  # Text of the error, if there is no answer.


@message
class Close(Message):
    """Exit after the running calls have ended."""

    reason: str  # Calls that wait for other workers fail for this reason.
