"""What a program did and what came of it, as the model judges it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from tests.chaos.machine import Deliberate
from tests.chaos.programs import BACKGROUND, TURNERS

from colocate import Call, ColocatedGroup
from colocate.errors import RoleError, RoleStartError

_LONGEST = 4000


@attrs.define(eq=False)
class Sent:
    ident: int  # its number, unique in the program; the order of numbers is the order of submission
    what: str  # the method, in words
    ranks: tuple[int, ...]  # the slots of the group that run it
    timeout: float | None  # its own
    expected: Callable[[Any], str | None]  # looks at its value; a complaint, or None
    fails: tuple[int, ...] = ()  # the slots on which the method is told to raise
    times_out: bool = False  # whether it has been made to outlive its timeout
    giver: ReplaySource | None = None  # of a sync, the group whose weights it brings, and the role
    given: str = ""
    giving: int = 0  # that group's generation
    call: Call[Any] | None = None  # what was submitted; None when that failed
    value: Any = None  # its value
    error: BaseException | None = None  # what it ended with
    generation: int = 0  # the group's, when it was made
    submitted: float = 0.0  # when, in monotonic time
    settled: float | None = None  # when it was known how it ended
    where: str = ""  # in a step of training, where it is told to raise
    role: str = "a"  # the role that it was made on
    count: int | None = None  # how many rows it has, where these end one by one
    rows: list[tuple[int, Any]] = attrs.field(factory=list)  # those that have come, in the order in which they did
    closed: bool = False  # whether its stream was closed before its end
    failing: tuple[int, ...] = ()  # the rows that raise, and whose errors are returned
    sticky: bool = False  # whether rows with one key are to have one rank
    aborted: bool = False  # whether a pause of its role gives it up, if it runs
    beside: bool = False  # whether it may begin only after a pause of its role: syncs made after it come before it
    bereaved: tuple[int, ...] = ()  # the slots on which a child of the role was killed, by this call or before it
    begin: Callable[[Any, int], Any] | None = None  # submits it to a view, by its number
    kept: Any = None  # where what it keeps is noted, for who takes it

    @property
    def noted(self) -> str:
        return self.role if self.role in (*TURNERS, BACKGROUND) else "a"

    @property
    def writes(self) -> bool:
        return self.what not in ("look", "sleep", "wake", "memory")

    @property
    def fine(self) -> bool:
        return self.settled is not None and self.error is None

    @property
    def trains(self) -> bool:
        return self.what == "train"

    @property
    def raised(self) -> bool:
        return self.error is not None and self.is_told_by(self.error)

    def is_told_by(self, error: BaseException) -> bool:
        cause = error.__cause__
        return (
            isinstance(error, RoleError)
            and (place := error.rank if self.count is None else error.row) in (*self.fails, *self.failing)
            and isinstance(cause, Deliberate)
            and (cause.ident, cause.rank) == (self.ident, place)
            and error.remote_traceback is not None
        )

    def __str__(self) -> str:
        on = ",".join(map(str, self.ranks))
        here = f" from {self.giver.name}.{self.given}" if self.giver is not None else ""
        return f"call {self.ident} ({self.what}{here} on {on})"


@attrs.define(eq=False)
class ReplaySource:
    """One group of an episode, and its calls in order of submission."""

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
    generation: int = 0  # how often it has been restarted
    struck: int = 0  # which generation the fault comes to
    checkpoint: int | None = None  # the tag of its last one
    saved: dict[int, int] = attrs.field(factory=dict)  # the generation of which each checkpoint is, by tag
    # the tag of the checkpoint that a generation has begun from, if there was one
    restored: dict[int, int | None] = attrs.field(factory=dict)
    wrong: list[str] = attrs.field(factory=list)
    hurried: bool = False
    background: bool = False  # whether it has a background role
    budget: int = 0  # what its roles may have of each slot's memory, where they take turns
    spawn_error: BaseException | None = None


def history(group: ReplaySource, generation: int) -> list[Sent]:
    """The calls that a generation may have begun, and those that the checkpoint has which it was restored from.

    Rows that hadn't ended in the last generation may have begun anew.
    """
    tag = group.restored.get(generation)
    before = [] if tag is None else [sent for sent in history(group, group.saved[tag]) if sent.ident < tag]
    again = [sent for sent in group.sent if sent.count is not None and sent.generation == generation - 1]
    here = [sent for sent in group.sent if sent.generation == generation]
    return before + [sent for sent in again if sent not in before] + here


@attrs.define(eq=False)
class Applied:
    kind: str  # as in the program; of a dropped connection its target
    group: int  # index of the group
    rank: int  # the slot
    pid: int  # of the worker; where that hadn't said hello yet, of its upper supervisor
    began: float  # when it began to be done, in monotonic time
    done: float  # when it was done
    moment: str  # what was under way
    went_on: float | None = None  # when a stopped worker was made to go on
    below: int = 0  # the worker's then: its hello may have been on its way
    name: str = ""  # that of the group: another one may have been spawned in its place before


@attrs.define(eq=False)
class Outcome:
    played: list[ReplaySource]  # its groups, those that others have taken the place of among them
    applied: Applied | None = None  # its fault, if it could be done
    hangs: list[str] = attrs.field(factory=list)  # what outlived its bound
    error_s: float | None = None  # from the fault to the first error that tells it
    close_over_s: float | None = None  # what the close of a group that hung took beside its grace
    pool_closed: bool = False  # whether the pool was closed with it


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
