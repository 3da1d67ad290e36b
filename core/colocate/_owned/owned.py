"""The ownership law: everything that lives has one owner, is closed in order, and says what closed it.

`Owned` is the base of runtime, pool and group. Who may close what is decided here, and `Lifecycle` has what each is
doing, why it can't be used, and the only ways from state to state:

    starting -> ready -> failed -> restarting -> ready, or failed for good

From each of these it can be closed: closing -> closed. A closing that comes to nothing leads back to where it began.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from colocate._role.call import OnDriver
from colocate._signals import guard
from colocate._signals.deferred import Flag, run_deferred
from colocate._signals.in_framework import refuse_to_wait
from colocate._system.deadline import Deadline
from colocate._system.limits import GIVEN_UP_WITHIN_S, LEAST_GRACE_S
from colocate._system.lines import caller, origin
from colocate._system.numbers import seconds
from colocate.errors import BorrowedError, ClosedError, ColocateError, ForkedError

N = TypeVar("N", bound="Owned")
H = TypeVar("H")
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def forks() -> int:
    """How many forks lie between this process and the one that imported colocate first."""
    return _forks


def raise_together(what: str, errors: Sequence[BaseException]) -> None:
    """Raise what has gone wrong, if anything has; an interrupt as itself, so that it isn't taken for an error."""
    for error in errors:
        if not isinstance(error, Exception):
            for other in errors:
                if other is not error:
                    error.add_note(f"{what}: {type(other).__name__}: {other}")
            raise error
    if errors:
        raise BaseExceptionGroup(what, errors)


class State(enum.StrEnum):
    """What a node is doing."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    RESTARTING = "restarting"
    CLOSING = "closing"
    CLOSED = "closed"


class Lifecycle:
    """The life of one node. All methods may be called from any thread.

    Attributes:
        state: What it is doing.
        closed_by: What closes it or has closed it, and where.
        failure: What keeps it from going on.
        recovers: Whether it is rebuilt after that failure.
        overcome: A failure that it was rebuilt after, as long as nobody has taken note of that.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.closed_by: str | None = None
        self.failure: ColocateError | None = None
        self.recovers = False
        self.overcome: ColocateError | None = None
        self._is_told = True  # the failure, to whoever uses it
        self._before = state
        self._closer: int | None = None
        self._closing = Flag()  # this closing: set when it has ended, or come to nothing
        self._changed = Flag()  # set with the next change of the state
        self._lock = threading.RLock()

    def _enter(self, state: State, *before: State) -> bool:
        """Be in another state, from one of these; whether that was so. The lock is held."""
        if self.state not in before:
            return False
        self.state = state
        self._changed.set()
        self._changed = Flag()
        return True

    # -- use

    def ready(self) -> bool:
        """Have the node be usable, with no failure left; False when it is closed."""
        with self._lock:
            if not self._enter(State.READY, State.STARTING, State.RESTARTING):
                return False
            self.failure, self.recovers, self._is_told = None, False, True
            return True

    def fail(self, failure: ColocateError, is_told: bool, recovers: bool) -> None:
        """Note why the node can't go on; `is_told`: somebody is about to be told; `recovers`: it will be rebuilt."""
        with self._lock:
            self.failure, self._is_told, self.recovers = failure, is_told, recovers
            if recovers:
                self.overcome = failure
            self._enter(State.FAILED, State.READY, State.FAILED, State.RESTARTING)

    def restart(self) -> bool:
        """Note that the node is being rebuilt; False when it is closed."""
        with self._lock:
            return self._enter(State.RESTARTING, State.FAILED, State.RESTARTING)

    def told(self) -> ColocateError | None:
        """The failure, which somebody is told now."""
        self._is_told = True
        return self.failure

    def unreported_failure(self) -> ColocateError | None:
        """The failure, if nobody has been told it."""
        return None if self._is_told or (self.failure is not None and self.failure._told) else self.failure

    @property
    def is_starting(self) -> bool:
        """Whether it is being built, for the first time or anew."""
        return self.state in (State.STARTING, State.RESTARTING)

    @property
    def is_settled(self) -> bool:
        """Whether it won't come to be usable, or unusable, by itself."""
        return self.state != State.STARTING and not (self.recovers and self.state in (State.FAILED, State.RESTARTING))

    def wait_settled(self, timeout: float | None) -> bool:
        """Wait for that, at most so many seconds; whether it is so."""
        deadline = Deadline(timeout)
        while True:
            with self._lock:
                changed = self._changed
                if self.is_settled:
                    return True
            if not changed.wait(deadline.left):
                return self.is_settled

    @property
    def is_plain(self) -> bool:
        """Whether it can be used, and there is nothing that whoever does so is to be told."""
        return self.state is State.READY and self.failure is None and self.overcome is None

    def noted(self) -> None:
        """Somebody has taken note that it was rebuilt."""
        with self._lock:
            self.overcome = None

    # -- closing

    def close(self, by: str) -> bool:
        """Note what closes it; False when something has done so before."""
        with self._lock:
            if self.closed_by is not None:
                return False
            self.closed_by = by
            self._closer = threading.get_ident()
            self._before = self.state
            self._enter(State.CLOSING, self.state)
            return True

    def reopen(self) -> None:
        """Be as before: what was to close the node came to nothing, and whoever waits for its closing may try."""
        with self._lock:
            self.closed_by = self._closer = None
            self._enter(self._before, State.CLOSING)
            came_to_nothing, self._closing = self._closing, Flag()
        came_to_nothing.set()

    def end(self) -> None:
        """Note that the node is closed."""
        with self._lock:
            self._enter(State.CLOSED, State.CLOSING)
        self._closing.set()

    def wait_closed(self) -> bool:
        """Wait until who closes it has done so, unless that is this thread; False when it came to nothing."""
        with self._lock:
            closing = self._closing
            if self.closed_by is None:
                return False
            if self._closer == threading.get_ident():
                return True
        closing.wait()
        return self._closing is closing


class Making(Generic[N]):
    """Makes a node off the main thread. If the wait for that is interrupted, the node is closed, at whatever stage."""

    def __init__(self, what: str) -> None:
        """Args: what: What is being made, in words."""
        self._what = what
        self._node: N | None = None
        self._given_up = False

    def made(self, node: N) -> N:
        """There is a node now, if only a beginning; if nobody waits for it any more, it is closed, and this raises."""
        self._node = node
        if self._given_up:
            self.give_up()
            node.check()
        return node

    def give_up(self) -> None:
        """Nobody waits any more."""
        self._given_up = True  # before looking: one of the two threads sees what the other has noted
        if self._node is not None:
            self._node.give_up(f"an interruption of {self._what}")

    def run(self, work: Callable[[], N], name: Callable[[N], H]) -> H:
        """Do the work, which says `made`, and wait for it; what users hold of the node is made there, too."""
        refuse_to_wait(self._what)
        guard.start()
        try:
            return run_deferred(lambda: name(work()), self.give_up, GIVEN_UP_WITHIN_S)
        finally:
            guard.stop()  # unless something is connected now


class Owned(OnDriver):
    """A node of the ownership graph.

    Attributes:
        kind: runtime, pool or group.
        name: Its name.
        owner: The node that closes it at the latest; None for a runtime.
        life: What it is doing.
        children: The nodes it owns, in the order in which they were made.
        where: Where its slots have to lie, in words; empty where that doesn't matter.
        line: File and line that made it; for what a command-line option has made, the option and 0.
        created: When, in seconds of time.time().
        names: What users hold of it, by type; there is one.
        hurried: Whether nobody waits any more for what still runs in it: its close was interrupted.
        closed_as: What its user closes by closing it: itself, or the runtime that was made for it alone.
    """

    where = ""

    def __init__(self, kind: str, name: str, owner: Owned | None, state: State = State.READY) -> None:
        self.kind = kind
        self.name = name
        self.owner = owner
        self.life = Lifecycle(state)
        self.children: dict[int, Owned] = {}
        self.line = origin()
        self.created = time.time()
        self.hurried = False
        self.closed_as: Owned = self
        self.names: dict[type, Any] = {}
        self._born_after = _forks

    def join(self) -> None:
        """Become a part of the graph. A constructor's last act: another thread may close the owner at any line."""
        if self.owner is not None:
            self.owner.children[id(self)] = self

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name!r} {self.state}>"

    @property
    def state(self) -> str:
        """Return what it is doing, in a word."""
        return self.life.state.value

    @property
    def closed_by(self) -> str | None:
        """Return what closed it, and where."""
        return self.life.closed_by

    @property
    def alive(self) -> bool:
        """Whether it can be used."""
        return self.closed_by is None and self._born_after == _forks

    def check(self) -> None:
        """Raise ForkedError in a forked child, which owns nothing, and ClosedError once it has been closed."""
        if self._born_after != _forks:
            raise ForkedError(
                f"{self.kind} {self.name!r} belongs to the process that made it; a forked child can't use it. "
                "Start the child with the spawn method and connect there"
            )
        if (closed_by := self.life.closed_by) is not None:
            raise ClosedError(f"{self.kind} {self.name!r} was closed by {closed_by}", closed_by=closed_by)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that made it."""
        return self._born_after != _forks

    def take_closing(self, by: str, force: bool = True) -> bool:
        """Note what closes it, or wait until what has done so before is through: then there is nothing left to do.

        Raises:
            ForkedError: This is a forked child, which owns nothing.
            BorrowedError: Somebody's use of it would break (without `force`).
        """
        if self.forked:
            self.check()
        if not force and self.closed_by is None and (found := self.borrowers(self)):
            raise BorrowedError(
                f"{self.kind} {self.name!r} can't be closed: {'; '.join(found)}. Wait for them, or close(force=True)",
                borrowers=tuple(found),
            )
        while not self.life.close(by):
            if self.life.wait_closed():
                return False
        return True

    def disown(self) -> None:
        """Take it out of the graph."""
        if self.owner is not None:
            self.owner.children.pop(id(self), None)

    def lies_in(self, node: Owned) -> bool:
        """Whether it is a node or something below that."""
        return self is node or (self.owner is not None and self.owner.lies_in(node))

    def borrowers(self, closing: Owned) -> list[str]:
        """Return who uses it, would be broken by closing `closing`, and doesn't lie in that itself."""
        return [name for child in list(self.children.values()) for name in child.borrowers(closing)]

    def wind_down(self, grace: float, deadline: Deadline) -> None:
        """Begin nothing any more in it or below it, and tell the calls that run that nobody waits for them.

        Its owner is being closed, with a grace period of `grace` seconds that is over at `deadline`.
        """
        for child in list(self.children.values()):
            child.wind_down(grace, deadline)

    def close_children(self, grace: float) -> list[BaseException]:
        """Close what it owns, the newest first; what went wrong.

        The grace period is one for all: whatever runs there is told at once that nobody waits for it any more, and what
        waits behind that doesn't begin in its place. What still runs when it is over has had it, whoever's turn it is.
        """
        errors: list[BaseException] = []
        children = list(self.children.values())
        deadline = Deadline(grace)
        for child in children:
            child.wind_down(grace, deadline)
        for child in reversed(children):
            if self.hurried:  # Ctrl-C: the others are closed too, but nobody waits any more
                grace, deadline = 0.0, Deadline(0.0)
            # What is idle needs a moment to end, also when others have used the grace up.
            left = grace if child is children[-1] else max(deadline.left or 0.0, min(grace, LEAST_GRACE_S))
            try:
                child.close_for(f"closing {self.kind} {self.name!r} ({self.closed_by})", left, force=True)
            except BaseExceptionGroup as group:
                errors += group.exceptions
            except BaseException as error:
                errors.append(error)
        return errors

    def close_for(self, by: str, grace: float, force: bool) -> None:
        """Close it on behalf of `by`; each kind says how."""
        raise TypeError(f"a {self.kind} is closed by its owner")

    def hurry(self) -> None:
        """Nobody waits any more for what still runs in it: its grace period is over."""
        self.hurried = True
        for child in list(self.children.values()):
            child.hurry()

    def close_here(self, by: str, grace: float, force: bool) -> None:
        """Close it from a user's line, on whatever thread. An interruption of the wait hurries it, a second one leaves.

        Raises:
            BaseException: What has gone wrong; or the interruption, once it is closed, with that as its notes.
        """
        wrong: list[BaseException] = []

        def close() -> None:
            try:
                self.close_for(by, grace, force)
            except BaseException as error:
                wrong.append(error)

        try:
            run_deferred(close, self.hurry, None, in_any_case=True)
        except BaseException as interruption:
            for error in wrong:
                for each in error.exceptions if isinstance(error, BaseExceptionGroup) else (error,):
                    interruption.add_note(f"and then, closing {self.kind} {self.name!r}: {type(each).__name__}: {each}")
            raise
        finally:
            guard.stop()  # unless something else is connected
        if wrong:
            try:
                raise wrong.pop()
            finally:
                del wrong  # its traceback has this frame

    def close_by_caller(self, grace: float, force: bool) -> None:
        """Close it from the line of the user's code that called `close`; see `close_here`."""
        refuse_to_wait(f"closing {self.kind} {self.name!r}")
        file, number = caller()
        grace = seconds(grace, "close(grace)")
        self.closed_as.close_here(f"{self.kind}.close() at {file}:{number}", grace, force)

    def close_after(self, error: BaseException | None, by: str, grace: float) -> None:
        """Close it by force; when an error is in flight already, what goes wrong becomes a note of that one."""
        try:
            self.close_here(by, grace, force=True)
        except BaseExceptionGroup as group:
            if error is None:
                raise
            for each in group.exceptions:
                if each not in (error, error.__cause__):
                    error.add_note(f"and then, closing {self.kind} {self.name!r}: {type(each).__name__}: {each}")

    def give_up(self, by: str) -> None:
        """Close it at once: who was making it has been interrupted, and hears of that."""
        self.hurried = True
        with contextlib.suppress(BaseExceptionGroup):
            self.close_for(by, 0.0, True)
