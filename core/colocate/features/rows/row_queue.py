"""`RowQueue`, which passes the driver's messages about the rows of a call to the lane.

`RowsWork` represents the call on the lane.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs

from colocate._protocol.consequence import Consequence
from colocate._role.context import RowState
from colocate.features.rows.messages import AHEAD, NoMoreRows, ReadRows, Row
from colocate.worker.lane import Lane, Work
from colocate.worker.serving.scope import Scope

if TYPE_CHECKING:
    import asyncio

    from colocate.worker.serving.tasks import Tasks

_ROWS_TOLD = 4  # A report of stacks shows at most this many running rows.


class RowQueue:
    """The messages about the rows of one call, passed from the receiving thread to the lane.

    Attributes:
        lane: The lane of the call.
        rows: Index and body of each row that may begin.
        number: The call's number among the calls of the method, set by the first row.
        credit: The number of yielded rows that may still be sent.
        no_more: Whether no other rows will come.
        withdrawn: Whether all rows were withdrawn.
        stopped: Whether the group is about to close. No row begins any more, and running rows have a grace period.
        has_begun: Whether the call has begun.
        ended: The reason why a call that has begun must not wait any longer, such as a failure of an earlier call.
        running: The running rows, with their tasks. A failed row may come again before its task is over.
        is_alone: Whether no other rank works on the same rows, so that a withdrawn call may end here.
        awaiting: The task that awaits the next yielded row, if it may be cancelled.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.rows: deque[tuple[int, Any]] = deque()
        self.credit = AHEAD
        self.number = 0
        self.no_more = self.withdrawn = self.stopped = self.has_begun = False
        self.ended: str | None = None
        self.running: dict[RowState, asyncio.Task[None]] = {}
        self.is_alone = False
        self.awaiting: asyncio.Task[Any] | None = None
        self._cancelled: set[RowState] = set()
        self._news: asyncio.Future[None] | None = None
        self._told = threading.Event()

    # -- on the thread that receives; `wake` on the lane is to follow

    def tell(self, message: Row | NoMoreRows | ReadRows, body: Any) -> None:
        """Handle a message of the driver."""
        match message:
            case Row():
                self.number = message.number
                self.rows.append((message.row, body))
            case NoMoreRows():
                self.withdrawn = self.withdrawn or message.withdrawn
                self.no_more = True
            case ReadRows():
                self.credit += message.count
        self._told.set()

    def end(self, reason: str) -> None:
        """End all waits of the call. `check` then raises an error with the reason."""
        self.ended = reason
        self._told.set()

    def stop(self) -> None:
        """Prevent the start of further rows, because the group is about to close."""
        self.stopped = True
        self._told.set()

    # -- on the lane

    def begin(self, scope: Scope, seq: int) -> None:
        """Record that the call has begun, and discard reasons to end that arrived before."""
        self.has_begun, self.ended = True, None  # This comes first, so that a later reason isn't lost.
        if (why := scope.why(seq)) is not None:
            self.ended = why

    @property
    def may_go_on(self) -> bool:
        """Whether the method may yield the next row, or must stop. While false, the method waits."""
        return bool(self.credit or self.withdrawn or self.stopped or self.ended is not None)

    def check(self) -> None:
        """Raise a `Consequence` if the call must not wait any longer."""
        if self.ended is not None:
            raise Consequence(self.ended)

    def wait(self) -> None:
        """Block the lane until `may_go_on` is true."""
        while not self.may_go_on:
            self._told.wait()
            self._told.clear()

    def news(self) -> asyncio.Future[None]:
        """Return a future that the next `wake` completes."""
        import asyncio  # This import is late, because other calls don't need asyncio.

        self._news = asyncio.get_running_loop().create_future()
        return self._news

    def wake(self) -> None:
        """Wake the waits of the call after a message, or after the end of a row."""
        if self.withdrawn and self.awaiting is not None:
            self.awaiting.cancel()
            self.awaiting = None
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def over(self, row: RowState) -> None:
        """Record that a row's task has ended."""
        del self.running[row]
        self._cancelled.discard(row)
        self.wake()

    def fail(self, error: Callable[[], BaseException], only: RowState | None) -> None:
        """Cancel all running rows, or only the row `only` if given, and fail each with a new error."""
        for row, task in self.running.items():
            if only in (None, row):
                row.raised = error()
                task.cancel()

    def cancel(self) -> None:
        """Cancel each running row, at most once."""
        for row, task in self.running.items():
            if row not in self._cancelled:
                self._cancelled.add(row)
                task.cancel()

    def is_wanted(self, row: RowState) -> bool:
        """Return whether the framework hasn't cancelled a row.

        The row's task can't tell, because role code cancels tasks, too.
        """
        return row not in self._cancelled


@attrs.define(eq=False)
class RowsWork(Work):
    """A call on the lane with rows that end one by one.

    Attributes:
        row_queue: The queue of messages about the rows; None if the result stays on the worker.
        turn: The position of the last yielded row in the order of results (`RowState.turn`).
    """

    row_queue: RowQueue | None = attrs.field(default=None, init=False)
    turn: int | None = attrs.field(default=None, init=False)

    @property
    def is_whole(self) -> bool:
        """Whether features are notified once, at the end of the call. False if the driver sends single rows."""
        return self.spec.rows is None

    @property
    def may_wait(self) -> bool:
        """Whether role code may be running or awaited now. A call for rows may have no running row."""
        return self.is_whole or self.row_queue is None or bool(self.row_queue.running)

    def awaiting(self, frames: Sequence[FrameType]) -> Sequence[tuple[str, Sequence[FrameType]]]:
        """Return the names and frames of the places where the call waits, including the first running rows."""
        # This module imports asyncio, which other calls don't need.
        from colocate.worker.serving.tasks import frames_of

        rows = [] if self.row_queue is None else list(self.row_queue.running.items())[:_ROWS_TOLD]
        entries = [(f"{self.label}, row {state.row}", frames_of(task.get_coro())) for state, task in rows]
        return [entry for entry in entries if entry[1]] or super().awaiting(frames)

    def interrupt(self, tasks: Tasks, error: Callable[[], BaseException], row: RowState | None) -> None:
        """Fail one running row, all running rows, or the whole call with an error, and cancel the awaits."""
        if self.is_whole or self.row_queue is None:
            super().interrupt(tasks, error, row)
        else:
            self.row_queue.fail(error, row)
