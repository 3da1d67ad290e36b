"""What a worker says to its driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from colocate._protocol.ledger import Ledger
from colocate._protocol.message import Head, Message, message, read, values
from colocate._protocol.taken import Taken
from colocate._protocol.to_worker import Operations


@message
class Hello(Message):
    """It runs, and hears.

    Attributes:
        facts: Its process and versions.
    """

    facts: Mapping[str, Any]


@message
class Done(Message):
    """A call has gone well. Body: its result; none for None and for a kept one.

    Attributes:
        seq: The call; 0 for the construction of the roles.
        rows: How many of its rows aren't padding; None without any.
        start: When it began, in seconds of `time.time()`.
        end: When it was over.
        size: Bytes and rows of a result that was kept; None of others.
        updates: Beginnings and ends of updates of weights that it shares with other ranks.
        taken: What it was given of residents, where somebody wants to know that.
    """

    seq: int
    rows: int | None
    start: float
    end: float
    size: tuple[int, int | None] | None
    updates: int
    taken: Sequence[Taken] = ()


@message
class Failure(Message):
    """What an exception in a worker was, as a part of other messages.

    Attributes:
        type: Qualified name of the exception's type.
        text: Its message.
        traceback: The traceback in the worker, from the role's own code on.
        host: Whether colocate raised it (arguments that don't fit, a result that can't be sent), not the role.
        secondary: Whether a peer's connection had been lost before: then another rank's failure is the cause.
        role: Name of the role.
        unmade: What had come and couldn't be rebuilt, if the exception is from there.
    """

    type: str
    text: str
    traceback: str
    host: bool
    secondary: bool
    role: str | None
    unmade: str | None


@message
class Failed(Message):
    """A call has raised, and the rank has stopped itself. Body: the exception, if it can be sent.

    Attributes:
        seq: The call; 0 for the construction of the roles.
        failure: What it raised.
        operations: How many it has begun on each process group; see `Left`.
        updates: See `Done`.
        amid: Whether it has begun some in this call, or has raised in a backward pass.
        start: When it began, in seconds of `time.time()`.
        end: When it was over.
        taken: See `Done`.
    """

    seq: int
    failure: Failure
    operations: Operations
    updates: int
    amid: bool
    start: float
    end: float
    taken: Sequence[Taken] = ()

    def head(self) -> Head:
        """What travels of it."""
        seq, failure, *others = values(self)
        return "Failed", seq, values(failure), *others

    @classmethod
    def of(cls, *values: Any) -> Failed:
        """As `Message.of`."""
        seq, failure, *others = values
        return cls(seq, Failure(*failure), *others)


@message
class Alive(Message):
    """It has heard of a hold.

    Attributes:
        number: The hold's.
    """

    number: int


@message
class Held(Message):
    """It is back for a hold.

    Attributes:
        number: The hold's.
        begun: The highest call that it has begun.
        operations: How many it has begun on each process group; see `Left`.
        cut: Process groups that it has cut.
    """

    number: int
    begun: int
    operations: Operations
    cut: Sequence[str]


@message
class GroupsDropped(Message):
    """Some process groups are dropped, and roles have been told. Body: what one of them raised, if it can be sent.

    Attributes:
        number: The hold's.
        holders: Groups that somebody still holds, by name.
        failure: What a role's `renew` raised.
    """

    number: int
    holders: Sequence[str]
    failure: Failure | None

    def head(self) -> Head:
        """What travels of it."""
        return "GroupsDropped", self.number, self.holders, None if self.failure is None else values(self.failure)

    @classmethod
    def of(cls, *values: Any) -> GroupsDropped:
        """As `Message.of`."""
        number, holders, failure = values
        return cls(number, holders, None if failure is None else Failure(*failure))


@message
class CanWithdraw(Message):
    """Whether it can do without a call.

    Attributes:
        token: The question's number.
        can: It hadn't begun it.
    """

    token: int
    can: bool


@message
class Stack(Message):
    """What its lane does.

    Attributes:
        token: The question's number.
        text: In words, with the stack.
        running: The calls that run.
    """

    token: int
    text: str
    running: tuple[int, ...]


@message
class LedgerTold(Message):
    """What the worker's memory is used for.

    Attributes:
        token: The question's number.
        ledger: It; None where what a role holds can't be looked at.
        role: That role.
        trace: The traceback of what was raised then.
    """

    token: int
    ledger: Ledger | None
    role: str = ""
    trace: str = ""

    def head(self) -> Head:
        """What travels of it."""
        ledger = None if self.ledger is None else attrs.astuple(self.ledger, recurse=False)
        return "LedgerTold", self.token, ledger, self.role, self.trace

    @classmethod
    def of(cls, *values: Any) -> LedgerTold:
        """As `Message.of`."""
        token, ledger, role, trace = values
        return cls(token, None if ledger is None else Ledger(*ledger), role, trace)


@message
class Fetched(Message):
    """The part of a resident. Body: it; or the exception that kept it from being sent.

    Attributes:
        token: The question's number.
        rows: How many rows the call that made it worked on.
        failure: What kept it from being sent.
    """

    token: int
    rows: int | None
    failure: Failure | None

    def head(self) -> Head:
        """What travels of it."""
        return "Fetched", self.token, self.rows, None if self.failure is None else values(self.failure)

    @classmethod
    def of(cls, *values: Any) -> Fetched:
        """As `Message.of`."""
        token, rows, failure = values
        return cls(token, rows, None if failure is None else Failure(*failure))


@message
class Address(Message):
    """Where other workers reach it.

    Attributes:
        address: None when they needn't ask, or can't.
        trouble: Why they can't; "" otherwise.
    """

    address: str | None
    trouble: str = ""


@message
class Progress(Message):
    """How far a role has come.

    Attributes:
        role: Its name.
        done: How much is done.
        total: Of how much.
    """

    role: str | None
    done: int | float
    total: int | float | None


@message
class Broken(Message):
    """It lacks what it needs to run roles, such as a thread of its own or its device, and leaves.

    Attributes:
        reason: Why.
    """

    reason: str


@message
class Closed(Message):
    """It runs role code no longer, and is about to leave."""


@message
class Moved(Message):
    """Memory of a role has gone to sleep, or has been woken.

    Attributes:
        role: The role.
        asleep: Whether it has gone.
        nbytes: How many bytes.
        start: When that began, in seconds of time.time().
        end: When it was done.
        whole: Whether all of it sleeps now.
        why: What for.
        ahead: Whether that was done ahead of a role's turn, beside what another one ran.
        in_call: Whether a call waited for that.
        kept_awake: The bytes that were to go, too, and stay, by why.
    """

    role: str
    asleep: bool
    nbytes: int
    start: float
    end: float
    whole: bool
    why: str
    ahead: bool = False
    in_call: bool = False
    kept_awake: Mapping[str, int] = attrs.field(factory=dict)


@message
class Undefined(Message):
    """A bundle that the driver had sent couldn't be rebuilt; nothing of it is there.

    Attributes:
        ids: Those of the definitions in it.
        names: The globals of the script in it.
    """

    ids: Sequence[int]
    names: Sequence[str]


@message
class Ask(Message):
    """A question; answered by `Answer`.

    Attributes:
        token: Its number.
        question: What it wants to know.
    """

    token: int
    question: Message

    def head(self) -> Head:
        """What travels of it."""
        return "Ask", self.token, self.question.head()

    @classmethod
    def of(cls, *values: Any) -> Ask:
        """As `Message.of`."""
        token, question = values
        return cls(token, read(question))
