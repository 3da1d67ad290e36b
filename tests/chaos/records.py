"""Records of a program's calls, fault and results, for the model to judge."""

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
    ident: int  # unique in the program, in order of submission
    what: str  # the method, in words
    ranks: tuple[int, ...]  # the slots of the group that run the call
    timeout: float | None  # of the call itself
    expected: Callable[[Any], str | None]  # checks the value; returns a complaint, or None
    fails: tuple[int, ...] = ()  # the slots on which the method is told to raise
    times_out: bool = False  # whether the call is made to exceed the timeout
    giver: PlayedGroup | None = None  # of a sync, the source's group; `given` is the source role
    given: str = ""
    giving: int = 0  # the generation of the source's group
    call: Call[Any] | None = None  # the submitted call; None if the submission failed
    value: Any = None  # the call's value
    error: BaseException | None = None  # the call's error
    generation: int = 0  # the group's, at the submission
    submitted: float = 0.0  # when, in monotonic time
    settled: float | None = None  # when the value or error was known
    where: str = ""  # in a step of training, where ranks have to raise
    role: str = "a"  # the called role
    count: int | None = None  # the number of rows, if these end one by one
    rows: list[tuple[int, Any]] = attrs.field(factory=list)  # the received rows, in order of arrival
    closed: bool = False  # whether the stream was closed before its end
    failing: tuple[int, ...] = ()  # rows that raise, with their errors returned
    sticky: bool = False  # whether rows with one key must run on one rank
    aborted: bool = False  # whether a pause of the role aborts the running call
    beside: bool = False  # whether a pause may delay the call's begin beyond later syncs
    bereaved: tuple[int, ...] = ()  # the slots on which the role's child was killed, by this call or before
    begin: Callable[[Any, int], Any] | None = None  # submits the call to a view, with `ident`
    kept: Any = None  # the record of the kept value, for calls that take the value

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
class PlayedGroup:
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
    generation: int = 0  # the number of restarts
    struck: int = 0  # the generation that the fault hits
    checkpoint: int | None = None  # the tag of the last checkpoint
    saved: dict[int, int] = attrs.field(factory=dict)  # the generation of each checkpoint, by tag
    # the tag of the checkpoint that a generation was restored from, if any
    restored: dict[int, int | None] = attrs.field(factory=dict)
    wrong: list[str] = attrs.field(factory=list)
    hurried: bool = False
    background: bool = False  # whether there is a background role
    budget: int = 0  # the roles' budget of each slot's memory, where roles take turns
    spawn_error: BaseException | None = None


def history(group: PlayedGroup, generation: int) -> list[Sent]:
    """Return the calls that a generation may have begun, and the calls in the checkpoint behind the generation.

    Unfinished rows of the previous generation may have begun again.
    """
    tag = group.restored.get(generation)
    before = [] if tag is None else [sent for sent in history(group, group.saved[tag]) if sent.ident < tag]
    again = [sent for sent in group.sent if sent.count is not None and sent.generation == generation - 1]
    here = [sent for sent in group.sent if sent.generation == generation]
    return before + [sent for sent in again if sent not in before] + here


@attrs.define(eq=False)
class Applied:
    kind: str  # as in the program; for a dropped connection the target
    group: int  # index of the group
    rank: int  # the slot
    pid: int  # of the worker, or of its upper supervisor before the worker's hello
    began: float  # the injection's begin, in monotonic time
    done: float  # the injection's end
    moment: str  # the activity under way
    went_on: float | None = None  # when a stopped worker was continued
    below: int = 0  # the worker's own pid then: the hello may have been under way
    name: str = ""  # of the group, which may have replaced another one before


@attrs.define(eq=False)
class Outcome:
    played: list[PlayedGroup]  # the episode's groups, with those that were replaced
    applied: Applied | None = None  # the injected fault, if any
    hangs: list[str] = attrs.field(factory=list)  # the operations that outlived their bounds
    error_s: float | None = None  # from the fault to the first error that reports it
    close_over_s: float | None = None  # the time of a hanging group's close beyond its grace
    pool_closed: bool = False  # whether the pool was closed with the groups


def leaves(error: BaseException) -> tuple[BaseException, ...]:
    """Return the leaves of an `ExceptionGroup`, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return tuple(leaf for each in error.exceptions for leaf in leaves(each))
    return (error,)


def chain(error: BaseException | None) -> tuple[BaseException, ...]:
    """Return an error and its causes, down to the root."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__
    return tuple(found)


def short(error: BaseException | None) -> str:
    """Return an error in words, with the errors of a start's failed ranks, and with the stack of a hanging rank."""
    if error is None:
        return "no error"
    told = " <- ".join(f"{type(each).__name__}: {_text(each)}" for each in chain(error))
    if isinstance(error, RoleStartError):
        told += "".join(f"; rank {rank}: {short(each)}" for rank, each in error.errors.items())
    return told[:_LONGEST]


def _text(error: BaseException) -> str:
    text = str(error)
    return text if "its stack:" in text else text.partition("\n")[0]
