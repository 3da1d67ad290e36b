"""What driver and worker say to each other, and what a worker asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from colocate._protocol.ledger import Ledger
from colocate._protocol.message import Head, Message, message, read, values
from colocate._protocol.taken import Taken
from colocate._role.budget import Budgets

# Where in a message's body the one of a call lies: the index, where bodies are handed over as they are, or the range
# of bytes of its pickle and the buffers that it refers to.
Where: TypeAlias = "int | tuple[int, int, tuple[int, ...]] | None"

# How many operations were begun on each process group, and of how many ranks that is, by the group's name.
Operations: TypeAlias = "Mapping[str, tuple[int, int]]"


# -- to the worker


@message
class Boot(Message):
    """Who it is; a detached pool's worker is told again by each driver. Body: a `Boot` of the executor's.

    A worker of another version answers `Hello`, and nothing else: it doesn't read the body, nor what follows.

    Attributes:
        protocol: Of who says it (`versions.PROTOCOL`).
        version: Its colocate's version.
    """

    protocol: int
    version: str

    @classmethod
    def of(cls, *values: Any) -> Boot:
        """As `Message.of`, of any version."""
        protocol, version, *_ = values if len(values) >= 2 else (0, "")
        return cls(protocol, version)


@message
class Define(Message):
    """Definitions, before the first message that names them; the worker, too, says this of its own. Body: a lot.

    Attributes:
        ids: Those of the classes and functions.
        names: The globals that it sets: what their space is called there, and their name.
    """

    ids: Sequence[int]
    names: Sequence[tuple[str | int, str]]


@message
class Build(Message):
    """Construct the roles of the slot. Body: a list of `RoleBuild`.

    Attributes:
        generation: How often the group has been restarted.
        slots: How many slots the group has.
        default_group: Whether torch's default process group is there before them.
        nodes: Which slots lie on one node, in the environment that torchrun sets; None where nothing reads that.
        collective_timeout: How long an operation of a process group may take, in seconds.
        spill_dir: The folder in which memory that sleeps lies; None for one of the usual ones.
        budgets: How much memory they may have.
        restored: The folder of the checkpoint that they go on from; None for none.
    """

    generation: int
    slots: int
    default_group: bool
    nodes: Sequence[int] | None
    collective_timeout: float
    spill_dir: str | None
    budgets: Budgets
    restored: str | None

    def head(self) -> Head:
        """What travels of it."""
        kind, *before, budgets, restored = super().head()
        return kind, *before, budgets.plain(), restored

    @classmethod
    def of(cls, *values: Any) -> Build:
        """As `Message.of`."""
        generation, slots, default_group, nodes, timeout, spill_dir, budgets, restored = values
        return cls(generation, slots, default_group, nodes, timeout, spill_dir, Budgets.read(budgets), restored)


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
    """

    seq: int
    role: Any
    method: str
    keep: int | None
    valid: int | None
    uses: bool
    frees: Sequence[int]
    observed: bool = False


@message
class Batch(Message):
    """Several calls. Body: theirs, as one (`_protocol.bundle`).

    Attributes:
        frees: Residents that nobody needs any more.
        calls: The calls, and where in the body each has its own.
    """

    frees: Sequence[int]
    calls: Sequence[tuple[Call, Where]]

    def head(self) -> Head:
        """What travels of it."""
        return "Batch", self.frees, [(call.head(), where) for call, where in self.calls]

    @classmethod
    def of(cls, *values: Any) -> Batch:
        """As `Message.of`."""
        frees, calls = values
        return cls(frees, [(Call(*head[1:]), where) for head, where in calls])


@message
class Free(Message):
    """Nobody needs some residents any more.

    Attributes:
        keys: Theirs.
    """

    keys: Sequence[int]


@message
class Hold(Message):
    """A call has failed somewhere: begin no call from that one on, and say when nothing before it runs.

    Attributes:
        number: The hold's number; the highest one counts.
        failed: The call; 0 for the construction of the roles.
        cut: Whether to cut the process groups, too.
    """

    number: int
    failed: int
    cut: bool


@message
class Left(Message):
    """During a hold: a rank has failed, or is back, and begins no operation of a process group any more.

    Attributes:
        number: The hold's.
        slot: The rank's.
        operations: How many it had begun on each group, by the group's name, and of how many ranks that is.
    """

    number: int
    slot: int
    operations: Operations


@message
class DropGroups(Message):
    """All ranks are back, and some process groups are of no use any more: drop them; answered by `GroupsDropped`.

    Attributes:
        number: The hold's.
        names: The groups'; none where only roles are to be told.
        everybody: All roles are told, not only those that have to do with these groups.
    """

    number: int
    names: Sequence[str]
    everybody: bool


@message
class Join(Message):
    """Another slot needs the default process group: do this one's part in making it."""


@message
class Resume(Message):
    """All ranks are back: go on, but for some calls.

    Attributes:
        number: The hold that is over.
        withdrawn: Calls that are dropped.
    """

    number: int
    withdrawn: Sequence[int]


@message
class Unwanted(Message):
    """Nobody waits for a call any more: it ends as soon as it can (`ctx.cancelled`; what it awaits is cancelled).

    Attributes:
        seq: The call.
    """

    seq: int


@message
class Stop(Message):
    """The group is about to close: begin nothing any more."""


@message
class Withdraw(Message):
    """Hold a call up, if it hasn't begun, until it is `Decided`; answered by `CanWithdraw`.

    Attributes:
        token: The question's number.
        seq: The call.
    """

    token: int
    seq: int


@message
class Decided(Message):
    """What becomes of a call that was held up.

    Attributes:
        token: The question's number.
        seq: The call.
        drop: Whether it is dropped; it goes on otherwise, and nobody waits for it.
    """

    token: int
    seq: int
    drop: bool


@message
class AskStack(Message):
    """Say what the lane does; answered by `Stack`.

    Attributes:
        token: The question's number.
    """

    token: int


@message
class AskLedger(Message):
    """Say what the worker's memory is used for; answered by `LedgerTold`.

    Attributes:
        token: The question's number.
    """

    token: int


@message
class Fetch(Message):
    """Send the part of a resident; answered by `Fetched`.

    Attributes:
        token: The question's number.
        key: The resident.
        contents: Whether the part itself is wanted, or only its structure.
    """

    token: int
    key: int
    contents: bool


@message
class Listen(Message):
    """Other workers want to reach this one; answered by `Address`."""


@message
class Answer(Message):
    """What the driver says to an `Ask`.

    Attributes:
        token: The question's number.
        answer: The answer.
        error: Why there is none.
    """

    token: int
    answer: Any
    error: str | None


@message
class Close(Message):
    """End after what runs now.

    Attributes:
        reason: What waits for other workers is told.
    """

    reason: str


# -- from the worker


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
        taken: See `Done`.
    """

    seq: int
    failure: Failure
    operations: Operations
    updates: int
    amid: bool
    taken: Sequence[Taken] = ()

    def head(self) -> Head:
        """What travels of it."""
        return "Failed", self.seq, values(self.failure), self.operations, self.updates, self.amid, self.taken

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
        address: None when they needn't ask.
    """

    address: str | None


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
    """

    role: str
    asleep: bool
    nbytes: int
    start: float
    end: float
    whole: bool


@message
class Undefined(Message):
    """A lot that the driver had sent couldn't be rebuilt; nothing of it is there.

    Attributes:
        ids: Those of the definitions in it.
        names: The globals in it, as `Define` names them.
    """

    ids: Sequence[int]
    names: Sequence[tuple[str | int, str]]


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


# -- what it asks


@message
class WhereIs(Message):
    """Where another worker is reached.

    Attributes:
        group: Its group's name.
        slot: Its slot in that.
        generation: That of the group.
    """

    group: str
    slot: int
    generation: int


@message
class Aligned(Message):
    """Which residents that a call uses have the partition of the first, once all of them are made.

    Attributes:
        seq: The call.
        key: The first.
        others: The others.
    """

    seq: int
    key: int
    others: Sequence[int]


@message
class Missing(Message):
    """Send a definition that came here by name from another worker.

    Attributes:
        id: The definition's.
    """

    id: int


@message
class Source(Message):
    """The source of a module that lies beside the script, and of what that imports.

    Attributes:
        module: Its name.
    """

    module: str


@message
class Compare(Message):
    """Whether the driver has the modules that were imported here early, with other content.

    Attributes:
        modules: File and digest, by name.
    """

    modules: Mapping[str, tuple[str, str]]


@message
class HeardAll(Message):
    """Whether all that was said before has been heard: the answer comes after that."""


@message
class Meet(Message):
    """Wait for the other ranks, and have what one of them has brought.

    Attributes:
        board: What they meet for.
        members: How many they are.
        value: What this one brings; None for nothing.
        joins: Whether those that don't come by themselves are told to (`Join`).
        refusal: Why this one can't come, which all of them are told.
    """

    board: str
    members: int
    value: Any
    joins: bool
    refusal: str | None
