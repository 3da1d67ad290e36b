"""Messages from a worker to its driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Head, Message, message, read, values
from colocate._protocol.taken import Taken


@message
class Hello(Message):
    """Report that the worker runs and reads messages."""

    facts: Mapping[str, Any]  # process id and versions of the worker


@message
class Done(Message):
    """The result of a successful call. Body: the result; none for None and for a kept result.

    Attributes:
        seq: The call; 0 for the construction of the roles.
        rows: Number of rows that aren't padding; None for a call without rows.
        start: Begin of the call, in seconds of `time.time()`.
        end: End of the call, likewise.
        size: Bytes and rows of a kept result; None for other results.
        parts: Reports of features, by feature name (`OfWorker.finished`); None for no reports.
        taken: Residents that the call has received, if an observer asked for these notes.
    """

    seq: int
    rows: int | None
    start: float
    end: float
    size: tuple[int, int | None] | None
    parts: Mapping[str, Any] | None = None
    taken: Sequence[Taken] = ()


@message
class Failure(Message):
    """An exception in a worker, as a part of other messages."""

    type: str  # qualified name of the exception's type
    text: str  # the exception's message
    traceback: str  # the traceback in the worker, from role code on
    host: bool  # whether colocate raised it, not the role: unsuitable arguments, or a result that can't be sent
    secondary: bool  # whether a peer's connection was lost before: then another rank's failure is the cause
    role: str | None  # name of the role
    unmade: str | None  # the value that couldn't be unpickled, for such an exception


@message
class Failed(Message):
    """The failure of a call; the rank has stopped. Body: the exception, if picklable."""

    seq: int  # the call; 0 for the construction of the roles
    failure: Failure  # the exception
    parts: Mapping[str, Any]  # reports of features, by feature name (`OfWorker.halts`)
    start: float  # begin of the call, in seconds of `time.time()`
    end: float  # end of the call, likewise
    taken: Sequence[Taken] = ()  # see `Done`
    lane: str = ""  # the background role of the lane; "" for the main lane

    def head(self) -> Head:
        seq, failure, *rest = values(self)
        return "Failed", seq, values(failure), *rest

    @classmethod
    def of(cls, *values: Any) -> Failed:
        seq, failure, *rest = values
        return cls(seq, Failure(*failure), *rest)


@message
class Alive(Message):
    """Acknowledge that the worker has received a hold."""

    number: int  # the hold's number
    lane: str = ""  # see `Failed`


@message
class Held(Message):
    """Report that the lane has stopped for a hold."""

    number: int  # the hold's number
    begun: int  # the highest call that has begun
    parts: Mapping[str, Any]  # reports of features, by feature name (`OfWorker.back`)
    lane: str = ""  # see `Failed`
    unfinished: Sequence[tuple[int, str]] = ()  # number and label of calls that an earlier driver has left running here


@message
class CanWithdraw(Message):
    """The vote of a rank on the withdrawal of a call."""

    token: int  # the question's number
    can: bool  # whether the call hasn't begun here


@message
class Stack(Message):
    """The current work of the worker's lanes."""

    token: int  # the question's number
    text: str  # a description with the stack
    running: tuple[int, ...]  # the running calls


@message
class Fetched(Message):
    """The part of a resident. Body: the part, or the exception that prevented sending."""

    token: int  # the question's number
    rows: int | None  # number of rows of the call that made the part
    failure: Failure | None  # the failure that prevented sending

    def head(self) -> Head:
        return "Fetched", self.token, self.rows, None if self.failure is None else values(self.failure)

    @classmethod
    def of(cls, *values: Any) -> Fetched:
        token, rows, failure = values
        return cls(token, rows, None if failure is None else Failure(*failure))


@message
class Address(Message):
    """The address at which other workers reach this one."""

    address: str | None  # None if other workers need no address, or can't connect
    trouble: str = ""  # why other workers can't connect; ""  otherwise


@message
class Progress(Message):
    """The progress of a role's method."""

    role: str | None  # the role's name
    done: int | float  # finished amount
    total: int | float | None  # total amount


@message
class Broken(Message):
    """Report that the worker lacks a resource that roles need, such as a thread or a device; the worker exits."""

    reason: str  # the reason
    log_tail: str = ""  # the last output lines of a role's child, if the child's end is the reason


@message
class Closed(Message):
    """Report that the worker runs no more role code and is about to exit."""


@message
class Undefined(Message):
    """Report that a bundle of definitions couldn't be rebuilt; none of the definitions is usable."""

    ids: Sequence[int]  # ids of the bundle's definitions
    names: Sequence[str]  # the script's globals in the bundle


@message
class Ask(Message):
    """A question to the driver; answered by `Answer`."""

    token: int  # the question's number
    question: Message  # the question

    def head(self) -> Head:
        return "Ask", self.token, self.question.head()

    @classmethod
    def of(cls, *values: Any) -> Ask:
        token, question = values
        return cls(token, read(question))
