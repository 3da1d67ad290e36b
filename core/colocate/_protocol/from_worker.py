"""Messages from a worker to its driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Head, Message, decode_head, message, values
from colocate._protocol.taken import Receipt


@message
class Hello(Message):
    """Report that the worker runs and reads messages."""

    facts: Mapping[str, Any]  # Process id and versions of the worker.


@message
class CallEnded(Message):
    """Report the result of a successful call. The body is the result; None and kept results have no body.

    Attributes:
        seq: Number of the call; 0 for the construction of the roles.
        rows: Number of rows that aren't padding; None for a call without rows.
        start: Begin of the call, in seconds of `time.time()`.
        end: End of the call, in seconds of `time.time()`.
        size: Bytes and rows of a kept result; None for other results.
        parts: Reports of features, by feature name (`WorkerFeature.call_report`); None for no reports.
        receipts: Residents that the call has received, if an observer asked for these notes.
    """

    seq: int
    rows: int | None
    start: float
    end: float
    size: tuple[int, int | None] | None
    parts: Mapping[str, Any] | None = None
    receipts: Sequence[Receipt] = ()


@message
class Failure(Message):
    """The description of an exception in a worker, for use inside other messages."""

    type: str  # Qualified name of the exception's type.
    text: str  # Message of the exception.
    traceback: str  # Traceback in the worker, starting with role code.
    host: bool  # Whether colocate raised the exception and not the role, for example because of bad arguments.
    secondary: bool  # Whether another rank's failure is the likely cause, for example of a lost connection.
    role: str | None  # Name of the role, if known.
    unmade: str | None  # Name of the value that couldn't be unpickled, if this is the reason.


@message
class Failed(Message):
    """Report that a call has failed and the rank has stopped. The body is the exception, if picklable."""

    seq: int  # Number of the failed call; 0 for the construction of the roles.
    failure: Failure
    parts: Mapping[str, Any]  # Reports of features, by feature name (`WorkerFeature.failure_report`).
    start: float  # Begin of the call, in seconds of `time.time()`.
    end: float  # End of the call, in seconds of `time.time()`.
    receipts: Sequence[Receipt] = ()  # Residents that the call has received, if observed.
    lane: str = ""  # Background role of the lane; "" for the main lane.

    def head(self) -> Head:
        seq, failure, *rest = values(self)
        return "Failed", seq, values(failure), *rest

    @classmethod
    def from_values(cls, *values: Any) -> Failed:
        seq, failure, *rest = values
        return cls(seq, Failure(*failure), *rest)


@message
class Heartbeat(Message):
    """Acknowledge that the worker has received a hold."""

    number: int  # Number of the hold.
    lane: str = ""  # Background role of the lane; "" for the main lane.


@message
class HoldReached(Message):
    """Report that the lane has stopped for a hold."""

    number: int  # Number of the hold.
    begun: int  # Number of the last call that has begun.
    parts: Mapping[str, Any]  # Reports of features, by feature name (`WorkerFeature.hold_report`).
    lane: str = ""  # Background role of the lane; "" for the main lane.
    unfinished: Sequence[tuple[int, str]] = ()  # Number and label of calls that an earlier driver has left running.


@message
class CancelVote(Message):
    """Answer whether this rank can withdraw a call, because the call hasn't begun."""

    token: int  # Number of the answered question.
    can: bool  # Whether the call hasn't begun on this rank.


@message
class Stack(Message):
    """The answer to `AskStack`: the current work of the worker's lanes."""

    token: int  # Number of the answered question.
    text: str  # Description of the work, with stacks.
    running: tuple[int, ...]  # Numbers of the running calls.


@message
class Fetched(Message):
    """The answer to `Fetch`. The body is the part of the resident, or the exception that prevented sending."""

    token: int  # Number of the answered question.
    rows: int | None  # Number of rows of the call that made the part.
    failure: Failure | None  # The failure that prevented sending, if any.

    def head(self) -> Head:
        return "Fetched", self.token, self.rows, None if self.failure is None else values(self.failure)

    @classmethod
    def from_values(cls, *values: Any) -> Fetched:
        token, rows, failure = values
        return cls(token, rows, None if failure is None else Failure(*failure))


@message
class Address(Message):
    """The address at which other workers reach this worker."""

    address: str | None  # None if other workers need no address or can't connect.
    trouble: str = ""  # Reason why other workers can't connect; "" otherwise.


@message
class Progress(Message):
    """Report the progress of a role's method."""

    role: str | None
    done: int | float  # Amount of finished work.
    total: int | float | None  # Total amount of work, if known.


@message
class WorkerBroken(Message):
    """Report that the worker lacks a resource that roles need, such as a thread or a device; the worker exits."""

    reason: str
    log_tail: str = ""  # Last output lines of a role's child, if the call failed because the child ended.


@message
class LaneClosed(Message):
    """Report that the worker runs no more role code and is about to exit."""


@message
class BundleFailed(Message):
    """Report that a bundle of definitions couldn't be rebuilt; none of the definitions is usable."""

    ids: Sequence[int]  # Ids of the definitions in the received bundle of definitions.
    names: Sequence[str]  # Names of the script's globals among the definitions.


@message
class Ask(Message):
    """A question to the driver; answered by `Answer`."""

    token: int  # Number of the question.
    question: Message

    def head(self) -> Head:
        return "Ask", self.token, self.question.head()

    @classmethod
    def from_values(cls, *values: Any) -> Ask:
        token, question = values
        return cls(token, decode_head(question))
