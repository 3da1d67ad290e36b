"""`RowQueue`: what a driver says of the rows of a call that end one by one, on its way to the lane.

`RowsWork` is the call as the lane has it.
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

_ROWS_TOLD = 4  # of those that run, where stacks are asked for


class RowQueue:
    """What is said of the rows of one call, between the thread that receives it and the lane.

    Attributes:
        lane: That lane.
        rows: Those that are to begin: index and body of each.
        number: That of the call among those of its method, once a row has come.
        credit: How many may be told of those that a method yields.
        no_more: Whether no other rows will come.
        withdrawn: Whether nobody waits for any.
        stopped: Whether the group is about to close: nothing begins any more, and what runs has its grace.
        has_begun: Whether the call has begun.
        ended: Why a call that has begun must wait no longer: an earlier one has failed, say.
        running: The rows that run, each with its task. A row that has failed may come again before its task is over.
        is_alone: Whether no other rank works on the same rows, so that a call that is withdrawn may end here.
        awaiting: The task that awaits what a method yields next, where that may be cancelled.
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
        """Take what the driver says."""
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
        """If the call has begun, it must wait no longer."""
        self.ended = reason
        self._told.set()

    def stop(self) -> None:
        """The group is about to close."""
        self.stopped = True
        self._told.set()

    # -- on the lane

    def begin(self, scope: Scope, seq: int) -> None:
        """The call begins: what was the end of waits while it was queued, behind one that has failed, is past."""
        self.has_begun, self.ended = True, None  # first: what ends waits after this is heard
        if (why := scope.why(seq)) is not None:
            self.ended = why

    @property
    def may_go_on(self) -> bool:
        """Whether something may be yielded, or is no longer wanted."""
        return bool(self.credit or self.withdrawn or self.stopped or self.ended is not None)

    def check(self) -> None:
        """Raise if the call must wait no longer."""
        if self.ended is not None:
            raise Consequence(self.ended)

    def wait(self) -> None:
        """Wait until it may go on."""
        while not self.may_go_on:
            self._told.wait()
            self._told.clear()

    def news(self) -> asyncio.Future[None]:
        """Return what is done when there is something new."""
        import asyncio  # which no other call needs

        self._news = asyncio.get_running_loop().create_future()
        return self._news

    def wake(self) -> None:
        """Something is new."""
        if self.withdrawn and self.awaiting is not None:
            self.awaiting.cancel()
            self.awaiting = None
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def over(self, row: RowState) -> None:
        """A row's task has ended."""
        del self.running[row]
        self._cancelled.discard(row)
        self.wake()

    def fail(self, error: Callable[[], BaseException], only: RowState | None) -> None:
        """Each row that runs fails of an error, as what it awaits is cancelled; `only` this one, where it is named."""
        for row, task in self.running.items():
            if only in (None, row):
                row.raised = error()
                task.cancel()

    def cancel(self) -> None:
        """Cancel each row that runs, once."""
        for row, task in self.running.items():
            if row not in self._cancelled:
                self._cancelled.add(row)
                task.cancel()

    def is_wanted(self, row: RowState) -> bool:
        """Whether somebody waits for a row. Its task doesn't say: role code cancels it, too, as task groups do."""
        return row not in self._cancelled


@attrs.define(eq=False)
class RowsWork(Work):
    """A call whose rows end one by one.

    Attributes:
        row_queue: By what its rows come and go; None where its result is kept here.
        turn: Of what it has yielded last, as `RowState.turn`.
    """

    row_queue: RowQueue | None = attrs.field(default=None, init=False)
    turn: int | None = attrs.field(default=None, init=False)

    @property
    def is_whole(self) -> bool:
        """See `Work.is_whole`: rows that the driver gives are parts."""
        return self.spec.rows is None

    @property
    def may_wait(self) -> bool:
        """See `Work.may_wait`."""
        return self.is_whole or self.row_queue is None or bool(self.row_queue.running)

    def awaiting(self, frames: Sequence[FrameType]) -> Sequence[tuple[str, Sequence[FrameType]]]:
        """See `Work.awaiting`: of its rows the first are told."""
        from colocate.worker.serving.tasks import frames_of  # it has asyncio, which others don't import

        rows = [] if self.row_queue is None else list(self.row_queue.running.items())[:_ROWS_TOLD]
        found = [(f"{self.label}, row {state.row}", frames_of(task.get_coro())) for state, task in rows]
        return [each for each in found if each[1]] or super().awaiting(frames)

    def interrupt(self, tasks: Tasks, error: Callable[[], BaseException], row: RowState | None) -> None:
        """See `Work.interrupt`."""
        if self.is_whole or self.row_queue is None:
            super().interrupt(tasks, error, row)
        else:
            self.row_queue.fail(error, row)
