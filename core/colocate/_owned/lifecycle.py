"""`Lifecycle`: what a runtime, pool or group is doing, why it can't be used, and the only ways from state to state.

    starting -> ready -> failed -> restarting -> ready, or failed for good

From each of these it can be closed: closing -> closed. A closing that comes to nothing leads back to where it began.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from colocate.errors import ColocateError


class State(enum.StrEnum):
    """What a node is doing."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    RESTARTING = "restarting"
    CLOSING = "closing"
    CLOSED = "closed"


class Lifecycle:
    """That of one node. All methods may be called from any thread.

    Attributes:
        state: What it is doing.
        closed_by: What closes it or has closed it, and where.
        failure: What keeps it from going on.
        recovers: Whether it is rebuilt after that failure.
        overcome: A failure that it was rebuilt after, as long as nobody has taken note of that.
        on_change: Called after each change, on any thread but the main one.
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
        self._closing = threading.Event()  # this closing: set when it has ended, or come to nothing
        self._news = threading.Condition()
        self.on_change: Callable[[], object] = lambda: None

    def _enter(self, state: State, *before: State) -> bool:
        """Be in another state, from one of these; whether that was so. The lock is held."""
        if self.state not in before:
            return False
        self.state = state
        self._news.notify_all()
        self.on_change()
        return True

    # -- use

    def ready(self) -> bool:
        """It can be used, and no failure is left; False when it is closed."""
        with self._news:
            if not self._enter(State.READY, State.STARTING, State.RESTARTING):
                return False
            self.failure, self.recovers, self._is_told = None, False, True
            self.on_change()
            return True

    def fail(self, failure: ColocateError, is_told: bool, recovers: bool) -> None:
        """It can't go on.

        Args:
            failure: What those are told who use it.
            is_told: Whether somebody is about to be.
            recovers: Whether it will be rebuilt.
        """
        with self._news:
            self.failure, self._is_told, self.recovers = failure, is_told, recovers
            if recovers:
                self.overcome = failure
            self._enter(State.FAILED, State.READY)

    def restart(self) -> bool:
        """It is being rebuilt; False when it is closed."""
        with self._news:
            return self._enter(State.RESTARTING, State.FAILED, State.RESTARTING)

    def fail_for_good(self, failure: ColocateError) -> None:
        """It could not be rebuilt."""
        with self._news:
            self.failure, self._is_told, self.recovers = failure, False, False
            self._enter(State.FAILED, State.FAILED, State.RESTARTING)

    def told(self) -> ColocateError | None:
        """The failure, which somebody is told now."""
        self._is_told = True
        return self.failure

    def untold(self) -> ColocateError | None:
        """The failure, if nobody has been told it."""
        return None if self._is_told else self.failure

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
        with self._news:
            return self._news.wait_for(lambda: self.is_settled, timeout)

    @property
    def is_plain(self) -> bool:
        """Whether it can be used, and there is nothing that whoever does so is to be told."""
        return self.state is State.READY and self.failure is None and self.overcome is None

    def noted(self) -> None:
        """Somebody has taken note that it was rebuilt."""
        with self._news:
            self.overcome = None
            self.on_change()

    # -- closing

    def close(self, by: Callable[[], str]) -> bool:
        """Note what closes it; False when something has done so before."""
        with self._news:
            if self.closed_by is not None:
                return False
            self.closed_by = by()
            self._closer = threading.get_ident()
            self._before = self.state
            self._enter(State.CLOSING, self.state)
            return True

    def reopen(self) -> None:
        """What was to close it has come to nothing: it is what it was, and whoever waits for its closing may try."""
        with self._news:
            self.closed_by = self._closer = None
            self._enter(self._before, State.CLOSING)
            came_to_nothing, self._closing = self._closing, threading.Event()
        came_to_nothing.set()

    def end(self) -> None:
        """It is closed."""
        with self._news:
            self._enter(State.CLOSED, State.CLOSING)
        self._closing.set()

    def wait_closed(self) -> bool:
        """Wait until who closes it has done so, unless that is this very thread, somewhere below.

        Returns:
            Whether it is closed; False when that has come to nothing.
        """
        with self._news:
            closing = self._closing
            if self.closed_by is None:
                return False
            if self._closer == threading.get_ident():
                return True
        closing.wait()
        return self._closing is closing
