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

_MOST_ROWS_SHOWN = 4  # A report of stacks shows at most this many running rows.


class RowQueue:
    """The messages about the rows of one call, passed from the receiving thread to the lane.

    Attributes:
        lane: The lane of the call.
        rows: Index and body of each row that may begin.
        number: The call's number among the calls of the method, set by the first row.
        credit: The number of yielded rows that may still be sent.
        is_complete: Whether no other rows will come.
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
        self.is_complete = self.withdrawn = self.stopped = self.has_begun = False
        self.ended: str | None = None
        self.running: dict[RowState, asyncio.Task[None]] = {}
        self.is_alone = False
        self.awaiting: asyncio.Task[Any] | None = None
        self._cancelled: set[RowState] = set()
        self._event: asyncio.Future[None] | None = None
        self._wakeup = threading.Event()

    # -- on the thread that receives; `notify_waiters` on the lane is to follow

    def on_message(self, message: Row | NoMoreRows | ReadRows, body: Any) -> None:
        """Handle a message of the driver."""
        match message:
            case Row():
                self.number = message.number
                self.rows.append((message.row, body))
            case NoMoreRows():
                self.withdrawn = self.withdrawn or message.withdrawn
                self.is_complete = True
            case ReadRows():
                self.credit += message.count
        self._wakeup.set()

    def end_waits(self, reason: str) -> None:
        """End all waits of the call. `check_waiting` then raises an error with the reason."""
        self.ended = reason
        self._wakeup.set()

    def stop_rows(self) -> None:
        """Prevent the start of further rows, because the group is about to close."""
        self.stopped = True
        self._wakeup.set()

    # -- on the lane

    def begin_call(self, scope: Scope, seq: int) -> None:
        """Record that the call has begun, and discard earlier reasons to end the waits."""
        # This precedes the check of the scope, so that a reason that arrives meanwhile isn't lost.
        self.has_begun, self.ended = True, None
        if (why := scope.get_wait_refusal(seq)) is not None:
            self.ended = why

    @property
    def can_proceed(self) -> bool:
        """Whether the method may yield the next row, or must stop. While false, the method waits."""
        return bool(self.credit or self.withdrawn or self.stopped or self.ended is not None)

    def check_waiting(self) -> None:
        """Raise a `Consequence` if the call must not wait any longer."""
        if self.ended is not None:
            raise Consequence(self.ended)

    def wait_until_ready(self) -> None:
        """Block the lane until `can_proceed` is true."""
        while not self.can_proceed:
            self._wakeup.wait()
            self._wakeup.clear()

    def next_event(self) -> asyncio.Future[None]:
        """Return a future that the next `notify_waiters` completes."""
        import asyncio  # This import is late, because other calls don't need asyncio.

        self._event = asyncio.get_running_loop().create_future()
        return self._event

    def notify_waiters(self) -> None:
        """Wake the waits of the call after a message, or after the end of a row."""
        if self.withdrawn and self.awaiting is not None:
            self.awaiting.cancel()
            self.awaiting = None
        if self._event is not None and not self._event.done():
            self._event.set_result(None)

    def on_row_over(self, row: RowState) -> None:
        """Record that a row's task has ended."""
        del self.running[row]
        self._cancelled.discard(row)
        self.notify_waiters()

    def fail_rows(self, error: Callable[[], BaseException], only: RowState | None) -> None:
        """Cancel all running rows, or only the row `only` if given, and fail each with a new error."""
        for row, task in self.running.items():
            if only in (None, row):
                row.raised = error()
                task.cancel()

    def cancel_rows(self) -> None:
        """Cancel each running row, at most once."""
        for row, task in self.running.items():
            if row not in self._cancelled:
                self._cancelled.add(row)
                task.cancel()

    def is_wanted(self, row: RowState) -> bool:
        """Return whether a row is still wanted, because the framework hasn't cancelled the row.

        The row's task can't tell, because role code cancels tasks, too.
        """
        return row not in self._cancelled


@attrs.define(eq=False)
class RowsWork(Work):
    """The lane's work for a call with rows that end one by one.

    Attributes:
        row_queue: The queue of messages about the rows; None if the result stays on the worker.
        turn: The position of the last yielded row in the order of results (`RowState.turn`).
    """

    row_queue: RowQueue | None = attrs.field(default=None, init=False)
    turn: int | None = attrs.field(default=None, init=False)

    @property
    def ends_at_once(self) -> bool:
        """Whether features are notified once, at the end of the call. False if the driver sends single rows."""
        return self.spec.rows is None

    @property
    def may_wait(self) -> bool:
        """Whether role code may be running or awaited now. False while a call with `rows=` has no running row."""
        return self.ends_at_once or self.row_queue is None or bool(self.row_queue.running)

    def describe_awaits(self, frames: Sequence[FrameType]) -> Sequence[tuple[str, Sequence[FrameType]]]:
        """Return the names and stack frames of the lines where the call waits, including the first running rows."""
        # This module imports asyncio, which other calls don't need.
        from colocate.worker.serving.tasks import list_frames

        rows = [] if self.row_queue is None else list(self.row_queue.running.items())[:_MOST_ROWS_SHOWN]
        entries = [(f"{self.label}, row {state.row}", list_frames(task.get_coro())) for state, task in rows]
        return [entry for entry in entries if entry[1]] or super().describe_awaits(frames)

    def fail_awaits(self, tasks: Tasks, error: Callable[[], BaseException], row: RowState | None) -> None:
        """Fail one running row, all running rows, or the whole call with an error, and cancel the awaits."""
        if self.ends_at_once or self.row_queue is None:
            super().fail_awaits(tasks, error, row)
        else:
            self.row_queue.fail_rows(error, row)
