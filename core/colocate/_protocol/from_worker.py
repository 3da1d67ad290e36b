"""What a worker says to its driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colocate._protocol.message import Head, Message, message, read, values
from colocate._protocol.taken import Taken


@message
class Hello(Message):
    """Tell that the worker runs, and hears."""

    facts: Mapping[str, Any]  # its process and versions


@message
class Done(Message):
    """A call has gone well. Body: its result; none for None and for a kept one.

    Attributes:
        seq: The call; 0 for the construction of the roles.
        rows: How many of its rows aren't padding; None without any.
        start: When it began, in seconds of `time.time()`.
        end: When it was over.
        size: Bytes and rows of a result that was kept; None of others.
        parts: What features say of it, by their names (`OfWorker.finished`); None for nothing.
        taken: What it was given of residents, where somebody wants to know that.
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
    """What an exception in a worker was, as a part of other messages."""

    type: str  # qualified name of the exception's type
    text: str  # its message
    traceback: str  # the traceback in the worker, from the role's own code on
    host: bool  # whether colocate raised it (arguments that don't fit, a result that can't be sent), not the role
    secondary: bool  # whether a peer's connection had been lost before: then another rank's failure is the cause
    role: str | None  # name of the role
    unmade: str | None  # what had come and couldn't be rebuilt, if the exception is from there


@message
class Failed(Message):
    """A call has raised, and the rank has stopped itself. Body: the exception, if it can be sent."""

    seq: int  # the call; 0 for the construction of the roles
    failure: Failure  # what it raised
    parts: Mapping[str, Any]  # what features say, by their names (`OfWorker.halts`)
    start: float  # when it began, in seconds of `time.time()`
    end: float  # when it was over
    taken: Sequence[Taken] = ()  # see `Done`
    lane: str = ""  # the background role whose lane it is of; "" for the main one

    def head(self) -> Head:
        """Return what travels of it."""
        seq, failure, *others = values(self)
        return "Failed", seq, values(failure), *others

    @classmethod
    def of(cls, *values: Any) -> Failed:
        """As `Message.of`."""
        seq, failure, *others = values
        return cls(seq, Failure(*failure), *others)


@message
class Alive(Message):
    """Tell that the worker has heard of a hold."""

    number: int  # the hold's
    lane: str = ""  # see `Failed`


@message
class Held(Message):
    """Tell that the worker is back for a hold."""

    number: int  # the hold's
    begun: int  # the highest call that it has begun
    parts: Mapping[str, Any]  # what features say, by their names (`OfWorker.back`)
    lane: str = ""  # see `Failed`
    unfinished: Sequence[tuple[int, str]] = ()  # number and label of calls that a driver has left, and this rank too


@message
class CanWithdraw(Message):
    """Whether it can do without a call."""

    token: int  # the question's number
    can: bool  # it hadn't begun it


@message
class Stack(Message):
    """What its lanes do."""

    token: int  # the question's number
    text: str  # in words, with the stack
    running: tuple[int, ...]  # the calls that run


@message
class Fetched(Message):
    """The part of a resident. Body: it; or the exception that kept it from being sent."""

    token: int  # the question's number
    rows: int | None  # how many rows the call that made it worked on
    failure: Failure | None  # what kept it from being sent

    def head(self) -> Head:
        """Return what travels of it."""
        return "Fetched", self.token, self.rows, None if self.failure is None else values(self.failure)

    @classmethod
    def of(cls, *values: Any) -> Fetched:
        """As `Message.of`."""
        token, rows, failure = values
        return cls(token, rows, None if failure is None else Failure(*failure))


@message
class Address(Message):
    """Where other workers reach it."""

    address: str | None  # None when they needn't ask, or can't
    trouble: str = ""  # why they can't; "" otherwise


@message
class Progress(Message):
    """How far a role has come."""

    role: str | None  # its name
    done: int | float  # how much is done
    total: int | float | None  # of how much


@message
class Broken(Message):
    """Tell that the worker lacks what roles need, such as a thread of its own or its device, and leaves."""

    reason: str  # why
    log_tail: str = ""  # the last lines of a role's child whose end that is


@message
class Closed(Message):
    """Tell that the worker runs role code no longer, and is about to leave."""


@message
class Undefined(Message):
    """A bundle that the driver had sent couldn't be rebuilt; nothing of it is there."""

    ids: Sequence[int]  # those of the definitions in it
    names: Sequence[str]  # the globals of the script in it


@message
class Ask(Message):
    """A question; answered by `Answer`."""

    token: int  # its number
    question: Message  # what it wants to know

    def head(self) -> Head:
        """Return what travels of it."""
        return "Ask", self.token, self.question.head()

    @classmethod
    def of(cls, *values: Any) -> Ask:
        """As `Message.of`."""
        token, question = values
        return cls(token, read(question))
