"""What a program did and what came of it, as the model judges it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from tests.chaos.machine import Deliberate
from tests.chaos.programs import TURNERS

from colocate import Call, ColocatedGroup
from colocate.errors import RoleError, RoleStartError

_LONGEST = 4000


@attrs.define(eq=False)
class Sent:
    """One call.

    Attributes:
        ident: Its number, unique in the program; the order of numbers is the order of submission.
        what: The method, in words.
        ranks: The slots of the group that run it.
        timeout: Its own.
        expected: Looks at its value; a complaint, or None.
        fails: The slots on which the method is told to raise.
        times_out: Whether it has been made to outlive its timeout.
        call: What was submitted; None when that failed.
        generation: The group's, when it was made.
        value: Its value.
        error: What it ended with.
        submitted: When, in monotonic time.
        settled: When it was known how it ended.
        where: In a step of training, where it is told to raise.
        role: The role that it was made on.
    """

    ident: int
    what: str
    ranks: tuple[int, ...]
    timeout: float | None
    expected: Callable[[Any], str | None]
    fails: tuple[int, ...] = ()
    times_out: bool = False
    call: Call[Any] | None = None
    value: Any = None
    error: BaseException | None = None
    generation: int = 0
    submitted: float = 0.0
    settled: float | None = None
    where: str = ""
    role: str = "a"

    @property
    def noted(self) -> str:
        """The role whose notes it is in."""
        return self.role if self.role in TURNERS else "a"

    @property
    def writes(self) -> bool:
        """Whether it writes into its role's memory."""
        return self.what not in ("look", "sleep", "wake", "memory")

    @property
    def fine(self) -> bool:
        """Whether it has succeeded."""
        return self.settled is not None and self.error is None

    @property
    def trains(self) -> bool:
        """Whether it is a step of training."""
        return self.what == "train"

    @property
    def raised(self) -> bool:
        """Whether it has failed as it was told to."""
        return self.error is not None and self.is_told_by(self.error)

    def is_told_by(self, error: BaseException) -> bool:
        """Whether this is the error that it was told to end with."""
        cause = error.__cause__
        return (
            isinstance(error, RoleError)
            and error.rank in self.fails
            and isinstance(cause, Deliberate)
            and (cause.ident, cause.rank) == (self.ident, error.rank)
            and error.remote_traceback is not None
        )

    def __str__(self) -> str:
        on = ",".join(map(str, self.ranks))
        return f"call {self.ident} ({self.what} on {on})"


@attrs.define(eq=False)
class Played:
    """One group of an episode, and its calls in order of submission.

    Attributes:
        generation: How often it has been restarted.
        struck: Which generation the fault comes to.
        checkpoint: The tag of its last one.
        saved: The generation of which each checkpoint is, by tag.
        restored: The tag of the checkpoint that a generation has begun from, if there was one.
        budget: What its roles may have of each slot's memory, where they take turns.
    """

    index: int
    name: str
    slots: int
    group: ColocatedGroup | None = None
    second: tuple[int, ...] = ()
    sent: list[Sent] = attrs.field(factory=list)
    close_errors: tuple[BaseException, ...] = ()
    closing: float | None = None
    grace: float = 0.0
    restarts: bool = False
    generation: int = 0
    struck: int = 0
    checkpoint: int | None = None
    saved: dict[int, int] = attrs.field(factory=dict)
    restored: dict[int, int | None] = attrs.field(factory=dict)
    wrong: list[str] = attrs.field(factory=list)
    hurried: bool = False
    budget: int = 0
    spawn_error: BaseException | None = None


@attrs.define(eq=False)
class Applied:
    """A fault that has been done.

    Attributes:
        kind: As in the program; of a dropped connection its target.
        group: Index of the group.
        rank: The slot.
        pid: Of the worker; where that hadn't said hello yet, of its upper supervisor.
        began: When it began to be done, in monotonic time.
        done: When it was done.
        moment: What was under way.
        went_on: When a stopped worker was made to go on.
        below: The worker's then: its hello may have been on its way.
        name: That of the group: another one may have been spawned in its place before.
    """

    kind: str
    group: int
    rank: int
    pid: int
    began: float
    done: float
    moment: str
    went_on: float | None = None
    below: int = 0
    name: str = ""


@attrs.define(eq=False)
class Outcome:
    """What came of an episode.

    Attributes:
        played: Its groups, those that others have taken the place of among them.
        applied: Its fault, if it could be done.
        hangs: What outlived its bound.
        error_s: From the fault to the first error that tells it.
        close_over_s: What the close of a group that hung took beside its grace.
        pool_closed: Whether the pool was closed with it.
    """

    played: list[Played]
    applied: Applied | None = None
    hangs: list[str] = attrs.field(factory=list)
    error_s: float | None = None
    close_over_s: float | None = None
    pool_closed: bool = False


def leaves(error: BaseException) -> tuple[BaseException, ...]:
    """What an `ExceptionGroup` holds, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return tuple(leaf for each in error.exceptions for leaf in leaves(each))
    return (error,)


def chain(error: BaseException | None) -> tuple[BaseException, ...]:
    """An error and its causes, down to the root."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__
    return tuple(found)


def short(error: BaseException | None) -> str:
    """An error, with what each failed rank of a start says. Of a rank that hangs all is told: what it did there."""
    if error is None:
        return "no error"
    told = " <- ".join(f"{type(each).__name__}: {_text(each)}" for each in chain(error))
    if isinstance(error, RoleStartError):
        told += "".join(f"; rank {rank}: {short(each)}" for rank, each in error.errors.items())
    return told[:_LONGEST]


def _text(error: BaseException) -> str:
    text = str(error)
    return text if "it is here" in text else text.partition("\n")[0]
