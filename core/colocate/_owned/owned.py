"""The ownership law: each object has one owner, is closed before the owner, and records the closer.

`Owned` is the base class of runtime, pool and group, and decides who may close what. `Lifecycle` holds the state of
each, the reason why a node is unusable, and the only transitions between states:

    starting -> ready -> failed -> restarting -> ready, or failed for good

Each of these states can lead to closing -> closed. A close that fails returns to the state before.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from colocate._role.call import DriverObject
from colocate._signals import guard
from colocate._signals.deferred import Flag, run_deferred
from colocate._signals.in_framework import check_may_wait
from colocate._system.deadline import Deadline
from colocate._system.limits import GIVEN_UP_WITHIN_S, LEAST_GRACE_S
from colocate._system.lines import find_caller, get_origin
from colocate._system.numbers import parse_seconds
from colocate.errors import BorrowedError, ClosedError, ColocateError, ForkedError

N = TypeVar("N", bound="Owned")
H = TypeVar("H")
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def count_forks() -> int:
    """Return the number of forks between this process and the process that first imported colocate."""
    return _forks


def raise_together(what: str, errors: Sequence[BaseException]) -> None:
    """Raise errors, if any, as one exception group. An interrupt is raised alone, with the other errors as notes."""
    for error in errors:
        if not isinstance(error, Exception):
            for other in errors:
                if other is not error:
                    error.add_note(f"{what}: {type(other).__name__}: {other}")
            raise error
    if errors:
        raise BaseExceptionGroup(what, errors)


class State(enum.StrEnum):
    """The state of a runtime, pool or group."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    RESTARTING = "restarting"
    CLOSING = "closing"
    CLOSED = "closed"


class Lifecycle:
    """The state of one ownership node, and the allowed changes. Any thread may call the methods.

    Attributes:
        state: The current state.
        closed_by: The closer, and the place of the close.
        failure: The reason why the node is unusable.
        recovers: Whether the node is rebuilt after the failure.
        past_failure: A failure before the last rebuild, until a user has been notified.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.closed_by: str | None = None
        self.failure: ColocateError | None = None
        self.recovers = False
        self.past_failure: ColocateError | None = None
        self._is_reported = True  # False if a failure waits to be reported to a user.
        self._state_before = state
        self._closer: int | None = None
        self._closing = Flag()  # Set when the current attempt to close has ended.
        self._changed = Flag()  # Set at the next change of the state.
        self._lock = threading.RLock()

    def _enter(self, state: State, *before: State) -> bool:
        """Change the state if the current state is among `before`; return whether it changed. Call under the lock."""
        if self.state not in before:
            return False
        self.state = state
        self._changed.set()
        self._changed = Flag()
        return True

    # -- use

    def set_ready(self) -> bool:
        """Mark the node as usable, without a failure; return False if closed."""
        with self._lock:
            if not self._enter(State.READY, State.STARTING, State.RESTARTING):
                return False
            self.failure, self.recovers, self._is_reported = None, False, True
            return True

    def set_failed(self, failure: ColocateError, is_told: bool, recovers: bool) -> None:
        """Record a failure that makes the node unusable.

        `is_told` means that a user is about to receive the failure, and `recovers` that the node will be rebuilt.
        """
        with self._lock:
            self.failure, self._is_reported, self.recovers = failure, is_told, recovers
            if recovers:
                self.past_failure = failure
            self._enter(State.FAILED, State.READY, State.FAILED, State.RESTARTING)

    def set_restarting(self) -> bool:
        """Mark the node as being rebuilt; return False if closed."""
        with self._lock:
            return self._enter(State.RESTARTING, State.FAILED, State.RESTARTING)

    def take_failure(self) -> ColocateError | None:
        """Return the failure, and mark the failure as reported."""
        self._is_reported = True
        return self.failure

    def unreported_failure(self) -> ColocateError | None:
        """Return the failure if no user has received the failure so far; otherwise None."""
        return None if self._is_reported or (self.failure is not None and self.failure._is_reported) else self.failure

    @property
    def is_starting(self) -> bool:
        """Whether the node is being built, for the first time or again."""
        return self.state in (State.STARTING, State.RESTARTING)

    @property
    def is_settled(self) -> bool:
        """Whether no start or restart of the node is in progress or about to begin."""
        return self.state != State.STARTING and not (self.recovers and self.state in (State.FAILED, State.RESTARTING))

    def wait_settled(self, timeout: float | None) -> bool:
        """Wait until the node is settled (see `is_settled`), at most `timeout` seconds; return False on a timeout."""
        deadline = Deadline(timeout)
        while True:
            with self._lock:
                changed = self._changed
                if self.is_settled:
                    return True
            if not changed.wait(deadline.seconds_left):
                return self.is_settled

    @property
    def is_usable(self) -> bool:
        """Whether the node is usable, with no failure to report."""
        return self.state is State.READY and self.failure is None and self.past_failure is None

    def acknowledge_restart(self) -> None:
        """Record that a user has been notified of the last rebuild."""
        with self._lock:
            self.past_failure = None

    # -- closing

    def mark_closing(self, by: str) -> bool:
        """Record the closer and begin to close; return False if a close has begun before."""
        with self._lock:
            if self.closed_by is not None:
                return False
            self.closed_by = by
            self._closer = threading.get_ident()
            self._state_before = self.state
            self._enter(State.CLOSING, self.state)
            return True

    def reopen(self) -> None:
        """Return to the state before a close that failed. Threads that wait for the close may then try to close."""
        with self._lock:
            self.closed_by = self._closer = None
            self._enter(self._state_before, State.CLOSING)
            came_to_nothing, self._closing = self._closing, Flag()
        came_to_nothing.set()

    def set_closed(self) -> None:
        with self._lock:
            self._enter(State.CLOSED, State.CLOSING)
        self._closing.set()

    def wait_closed(self) -> bool:
        """Wait until another thread has closed the node; return False if the close failed."""
        with self._lock:
            closing = self._closing
            if self.closed_by is None:
                return False
            if self._closer == threading.get_ident():
                return True
        closing.wait()
        return self._closing is closing


class NodeBuilder(Generic[N]):
    """Creates a node on another thread than the main one. If the user's wait is interrupted, the node is closed."""

    def __init__(self, what: str) -> None:
        self._label = what
        self._node: N | None = None
        self._given_up = False

    def set_node(self, node: N) -> N:
        """Register the new node. If the user's wait has already been interrupted, close the node and raise an error."""
        self._node = node
        if self._given_up:
            self.abandon()
            node.check_usable()
        return node

    def abandon(self) -> None:
        """Record that the user's wait was interrupted, and close the node if there is one."""
        self._given_up = True  # Set this before reading `_node`, so that this thread or `set_node` closes the node.
        if self._node is not None:
            self._node.abandon(f"an interruption of {self._label}")

    def build(self, work: Callable[[], N], name: Callable[[N], H]) -> H:
        """Run `work`, which creates the node and must call `set_node`. Return the user's handle, made by `name`."""
        check_may_wait(self._label)
        guard.start_guard()
        try:
            return run_deferred(lambda: name(work()), self.abandon, GIVEN_UP_WITHIN_S)
        finally:
            guard.stop_guard()  # The guard stays active while a runtime is connected.


class Owned(DriverObject):
    """A node of the ownership graph: a runtime, pool or group.

    Attributes:
        kind: runtime, pool or group.
        name: The node's name.
        owner: The node that closes this one at the latest; None for a runtime.
        life: The node's state.
        children: The owned nodes, in the order of their creation.
        where: Constraints on the places of slots, in words; "" for none.
        line: File and line of the creation; for a command-line option, the option and 0.
        created: Time of the creation, in seconds of time.time().
        names: The users' handles, by type; one of each.
        is_hurried: Whether running work gets no more grace: the close was interrupted.
        closed_as: The node to close in place of this one: itself, or the runtime made for this node alone.
    """

    where = ""

    def __init__(self, kind: str, name: str, owner: Owned | None, state: State = State.READY) -> None:
        self.kind = kind
        self.name = name
        self.owner = owner
        self.life = Lifecycle(state)
        self.children: dict[int, Owned] = {}
        self.line = get_origin()
        self.created = time.time()
        self.is_hurried = False
        self.closed_as: Owned = self
        self.names: dict[type, Any] = {}
        self._born_after = _forks

    def join_owner(self) -> None:
        """Add the node to the graph. Constructors do this last, because another thread may close the owner anytime."""
        if self.owner is not None:
            self.owner.children[id(self)] = self

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name!r} {self.state}>"

    @property
    def state(self) -> str:
        return self.life.state.value

    @property
    def closed_by(self) -> str | None:
        """The closer and the place of the close, as text."""
        return self.life.closed_by

    @property
    def alive(self) -> bool:
        return self.closed_by is None and self._born_after == _forks

    def check_usable(self) -> None:
        """Raise ForkedError in a forked child, which owns nothing, and ClosedError after a close."""
        if self._born_after != _forks:
            raise ForkedError(
                f"{self.kind} {self.name!r} belongs to the process that made it; a forked child can't use it. "
                "Start the child with the spawn method and connect there"
            )
        if (closed_by := self.life.closed_by) is not None:
            raise ClosedError(f"{self.kind} {self.name!r} was closed by {closed_by}", closed_by=closed_by)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the node's process."""
        return self._born_after != _forks

    def claim_closing(self, by: str, force: bool = True) -> bool:
        """Record the closer and return True; or, if another close has begun, wait for its end and return False.

        Raises:
            ForkedError: This is a forked child, which owns nothing.
            BorrowedError: A borrow would break (without `force`).
        """
        if self.is_forked:
            self.check_usable()
        if not force and self.closed_by is None and (users := self.borrowers(self)):
            raise BorrowedError(
                f"{self.kind} {self.name!r} can't be closed: {'; '.join(users)}. Wait for them, or close(force=True)",
                borrowers=tuple(users),
            )
        while not self.life.mark_closing(by):
            if self.life.wait_closed():
                return False
        return True

    def disown(self) -> None:
        if self.owner is not None:
            self.owner.children.pop(id(self), None)

    def is_within(self, node: Owned) -> bool:
        """Return whether this node is `node` or one of the nodes below `node`."""
        return self is node or (self.owner is not None and self.owner.is_within(node))

    def borrowers(self, closing: Owned) -> list[str]:
        """Describe the uses of this node's residents, from outside of `closing`, that a close of `closing` breaks."""
        return [name for child in list(self.children.values()) for name in child.borrowers(closing)]

    def wind_down(self, grace: float, deadline: Deadline) -> None:
        """Prevent further work in this node and the nodes below, and cancel the running calls.

        The owner is being closed, with a grace period of `grace` seconds that ends at `deadline`.
        """
        for child in list(self.children.values()):
            child.wind_down(grace, deadline)

    def close_children(self, grace: float) -> list[BaseException]:
        """Close the children, the newest first; return the errors.

        The grace period is common: all running work is cancelled at once, and queued work doesn't begin. Work that
        still runs at the end of the period gets no more time.
        """
        errors: list[BaseException] = []
        children = list(self.children.values())
        deadline = Deadline(grace)
        for child in children:
            child.wind_down(grace, deadline)
        for child in reversed(children):
            if self.is_hurried:  # After Ctrl-C, the remaining children are closed without waiting.
                grace, deadline = 0.0, Deadline(0.0)
            # An idle child needs a moment to end, even after others have used up the grace period.
            child_grace = (
                grace if child is children[-1] else max(deadline.seconds_left or 0.0, min(grace, LEAST_GRACE_S))
            )
            try:
                child.close_for(f"closing {self.kind} {self.name!r} ({self.closed_by})", child_grace, force=True)
            except BaseExceptionGroup as group:
                errors += group.exceptions
            except BaseException as error:
                errors.append(error)
        return errors

    def close_for(self, by: str, grace: float, force: bool) -> None:
        """Close the node. The text `by` describes the closer. Each kind of node implements this."""
        raise TypeError(f"a {self.kind} is closed by its owner")

    def hurry(self) -> None:
        """End the grace period of running work in this node and all nodes below."""
        self.is_hurried = True
        for child in list(self.children.values()):
            child.hurry()

    def close_here(self, by: str, grace: float, force: bool) -> None:
        """Close the node and wait. An interruption ends the grace period, and a second interruption ends the wait.

        Raises:
            BaseException: The errors of the close; or the interruption, with the errors of the close as notes.
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
                for failure in error.exceptions if isinstance(error, BaseExceptionGroup) else (error,):
                    interruption.add_note(
                        f"and then, closing {self.kind} {self.name!r}: {type(failure).__name__}: {failure}"
                    )
            raise
        finally:
            guard.stop_guard()
        if wrong:
            try:
                raise wrong.pop()
            finally:
                del wrong  # This breaks the reference cycle of traceback and frame.

    def close_by_caller(self, grace: float, force: bool) -> None:
        """Close the node, and record the user's line that called `close` as the closer; see `close_here`."""
        check_may_wait(f"closing {self.kind} {self.name!r}")
        file, number = find_caller()
        grace = parse_seconds(grace, "close(grace)")
        self.closed_as.close_here(f"{self.kind}.close() at {file}:{number}", grace, force)

    def close_after(self, error: BaseException | None, by: str, grace: float) -> None:
        """Close the node by force. Errors of the close are raised, or become notes of `error` if given."""
        try:
            self.close_here(by, grace, force=True)
        except BaseExceptionGroup as group:
            if error is None:
                raise
            for failure in group.exceptions:
                if failure not in (error, error.__cause__):
                    error.add_note(f"and then, closing {self.kind} {self.name!r}: {type(failure).__name__}: {failure}")

    def abandon(self, by: str) -> None:
        """Close the node at once, because the creation of the node was interrupted. Errors of the close are dropped."""
        self.is_hurried = True
        with contextlib.suppress(BaseExceptionGroup):
            self.close_for(by, 0.0, True)
