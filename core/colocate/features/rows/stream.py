"""`Stream`, the driver's stream of the rows of a call. Any number of threads and tasks may read.

A signal handler may raise while a thread waits for a row or unpacks a row. The row is then put back for the next
reader. One reader handles the end of a call.
"""

from __future__ import annotations

import copy
import gc
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from colocate._calls.pending import PendingCall, blocked_calls
from colocate._signals.arrivals import Arrivals
from colocate._signals.deferred import get_waiting_thread, wait_until_done
from colocate._signals.in_framework import check_may_wait
from colocate._system.numbers import format_count
from colocate._system.tracebacks import is_of_handler
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ClosedError, ColocateError, GroupRestarted
from colocate.features.rows.calls import RowsCall, RowsRequest, left_out_error
from colocate.features.rows.row_stream import RowStream

_log = logging.getLogger("colocate")
_SETTLE_TIMEOUT_S = 0.1
_EndedRow: TypeAlias = tuple[RowsCall, int | None, tuple[int, Any] | None]
"""A call, an ended row, and the unpacked item if there is one already. If the row is None, the call has ended."""


class _Reader:
    """A record of the thread and task that last read a stream.

    Before the first read, the thread that created the stream counts as the reader.
    """

    def __init__(self) -> None:
        # Thread ids aren't stored, because the system reuses ids.
        self._thread = weakref.ref(threading.current_thread())
        self._task: weakref.ref[Any] | None = None

    def note_reader(self) -> None:
        self._thread, self._task = weakref.ref(threading.current_thread()), _current_task()

    def check_wait(self, stream: PendingCall, waiting: PendingCall, awaits: bool) -> None:
        """Raise an error if the stream's only reader is about to wait for a call that comes after the stream's call.

        The wait would never end, because nobody would read the stream. The check includes calls on which the awaited
        call depends: the calls that made the call's residents, and earlier calls with such dependencies.
        """
        if self._thread() is not get_waiting_thread() or (
            awaits and (self._task is None or self._task != _current_task())
        ):
            return
        for call in _awaited_calls(waiting):
            if not _is_behind(call, stream):
                continue
            # The stream may be garbage already, kept alive only by an exception's frames or by pending callbacks.
            wait_until_done(_SETTLE_TIMEOUT_S)
            gc.collect()
            if stream not in blocked_calls or stream.done():
                return
            reader = "task" if awaits else "thread"
            subject = waiting.label if call is waiting else f"{waiting.label} waits for {call.label}, which"
            raise ColocateError(
                f"{subject} comes after the stream of {stream.label} that was opened at {stream.called_at}, whose "
                f"rows haven't all been read, and are read by this {reader}: it would wait for itself. Read all of "
                "them first, or close the stream (`with view.method.stream(...) as rows:`)",
                group=None if waiting.link is None else waiting.link.name,
                role=waiting.role,
                method=waiting.method,
            )


def _awaited_calls(waiting: PendingCall) -> list[PendingCall]:
    """Return a call, with all unfinished calls that must end before this call can end.

    Earlier calls count only if they wait for other calls.
    """
    calls = [waiting]
    for call in calls:
        sent = list(call.link.order.pending.values()) if isinstance(call.link, WorkerGroup) else []
        awaited = [use._kept.call for use in call.uses]
        before = (other for other in sent if _is_behind(call, other))
        awaited += [other for other in before if other.uses or other.is_for_all or other.partner is not None]
        if call.partner is not None:
            awaited.append(call.partner)
        calls += [other for other in awaited if not (other.done() or other in calls)]
    return calls


def _is_behind(call: PendingCall, other: PendingCall) -> bool:
    """Return whether a call comes after another call in the order of a lane, on at least one rank."""
    return (
        (link := other.link) is call.link
        and link is not None
        and other is not call
        and not -1 < call.seq < other.seq
        and not set(other.targets).isdisjoint(call.targets)
        and (
            other.lane == call.lane
            or (call.is_for_all and not link.is_paused(other.lane))
            or (other.is_for_all and not link.is_paused(call.lane))
        )
    )


def _current_task() -> weakref.ref[Any] | None:
    asyncio = sys.modules.get("asyncio")
    try:
        task = None if asyncio is None else asyncio.current_task()
    except (RuntimeError, AttributeError):  # No event loop runs here, or another thread is importing asyncio.
        return None
    return None if task is None else weakref.ref(task)


class Stream(RowStream[Any]):
    """The driver's stream of the rows of a call, which continues after a restart of the group."""

    def __init__(self, asked: RowsRequest, is_ahead: bool) -> None:
        self._is_closed = self._is_told = False
        self._request = asked
        self._is_ahead = is_ahead
        self._arrivals: Arrivals[_EndedRow] = Arrivals()
        self._reader = _Reader()
        self._done_rows: set[int] = set()
        self._end_cause: BaseException | None = None  # The error that ended the stream; None if there is none.
        self._call: RowsCall
        self._calls: list[RowsCall] = []  # The current call, and calls before a restart.
        self._open_calls: list[RowsCall] = []  # Calls that are running, or have an end that no reader has handled.
        try:
            asked.send_call(range(asked.count), is_ahead, self._attach_call)
        except BaseException:
            self._arrivals.end_queue()
            if (call := getattr(self, "_call", None)) is not None:  # A call was created, and perhaps sent.
                blocked_calls.pop(call, None)
                asked.worker_group.services.timers.call_soon(call.withdraw)
            raise
        if len(self._done_rows) == asked.count:
            blocked_calls.pop(self._call, None)

    def _attach_call(self, call: RowsCall) -> None:
        """Connect a new call with this stream, before the call is sent."""
        self._call = call
        self._calls.append(call)
        self._open_calls.append(call)
        call.is_streamed, call.arrivals = True, partial(_on_row, self._arrivals)
        call._add_callback(call.arrivals)
        if self._is_ahead:
            blocked_calls[call] = self._reader.check_wait

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._is_closed
            else f"{len(self._done_rows)} of {format_count(self._request.count, 'row')} read"
        )
        return f"<stream of {self._request.label}, {state}>"

    def __next__(self) -> tuple[int, Any]:
        self._reader.note_reader()
        mine: deque[_EndedRow] = deque()
        end: BaseException | None = None
        waits = False
        try:
            while (end := self._end_error(StopIteration, waits)) is None:
                if not self._arrivals.take_item(mine):
                    self._check_wait(awaits=False)
                    waits = True
                    self._arrivals.wait_for_item()
                elif (result := self._take_row(mine)) is not None:
                    return result
                elif mine:
                    self._resolve_rows(mine[0][0])
                    mine.clear()
            raise end
        except BaseException as error:
            self._return_rows(mine, error is end)
            end = None  # `end` refers to this frame, which would be a reference cycle.
            raise

    async def __anext__(self) -> tuple[int, Any]:
        self._reader.note_reader()
        mine: deque[_EndedRow] = deque()
        end: BaseException | None = None
        waits = False
        try:
            while (end := self._end_error(StopAsyncIteration, waits)) is None:
                if not self._arrivals.take_item(mine):
                    self._check_wait(awaits=True)
                    waits = True
                    await self._arrivals.async_wait_for_item()
                elif (result := self._take_row(mine)) is not None:
                    return result
                elif mine:
                    import asyncio

                    await asyncio.to_thread(self._resolve_rows, mine[0][0])
                    mine.clear()
            raise end
        except BaseException as error:
            self._return_rows(mine, error is end)
            end = None
            raise

    def _return_rows(self, rows: deque[_EndedRow], is_end: bool) -> None:
        """Put taken rows back into the queue, so that none is lost, and note whether the stream's end was raised."""
        self._arrivals.items.extendleft(rows)
        self._is_told = self._is_told or is_end
        self._arrivals.wake_waiters()

    def close(self) -> None:
        """Stop reading, withdraw the call, and notify all waiting readers (see `RowStream.close`)."""
        if self._is_closed or self._arrivals.is_over:
            return
        # This precedes `_detach_call`, because a restart checks the flag after sending a new call.
        self._is_closed = True
        self._detach_call(self._call)
        self._arrivals.end_queue()  # Other readers may be waiting.

    def _detach_call(self, call: RowsCall) -> None:
        """Withdraw a call that nobody reads any more, and log a failure of the call."""
        worker_group = self._request.worker_group
        blocked_calls.pop(call, None)
        if worker_group.is_forked:
            return
        if not call.done():
            worker_group.services.timers.call_soon(call.withdraw)
        call._add_callback(partial(_report_failure, worker_group))

    def __del__(self) -> None:
        with suppress(AttributeError, RuntimeError):  # The call was never sent, or the interpreter is ending.
            self.close()

    # -- what comes next

    def _end_error(self, kind: type[BaseException], waits: bool) -> BaseException | None:
        """Return the exception for a reader if no row will come: first the stream's error, later a plain stop."""
        self._call._check_fork()
        if self._is_closed:
            return ClosedError(f"the stream of {self._request.label} was closed, and is read")
        if not self._arrivals.is_over or self._arrivals.items:
            return None
        if self._end_cause is None or (self._is_told and not waits):
            return kind()
        return copy.copy(self._end_cause) if isinstance(self._end_cause, ColocateError) else self._end_cause

    def _check_wait(self, awaits: bool) -> None:
        self._call.schedule_read()
        if not awaits:
            check_may_wait(self._request.label)
        if blocked_calls:
            self._call.check_deadlock(awaits)

    def _take_row(self, mine: deque[_EndedRow]) -> tuple[int, Any] | None:
        """Return the row that a reader has taken. None for the end of a call, or if the value can't be rebuilt."""
        call, row, result = mine[0]
        if row is None:
            return None
        if result is None:
            if not self._is_usable(call, row):
                mine.clear()
                return None
            try:
                mine[0] = call, row, (result := (row, call.row_value(row)))
            except ColocateError as error:
                if is_of_handler(error):
                    raise
                self._end_cause = error  # The value can't be rebuilt, so the other rows are dropped.
                self._detach_call(call)
                self._arrivals.items.clear()
                self._arrivals.end_queue()
                mine.clear()
                return None
        self._done_rows.add(row)
        call.note_read(row)
        if len(self._done_rows) == self._request.count:
            blocked_calls.pop(call, None)
        return result

    def _is_usable(self, call: RowsCall, row: int) -> bool:
        end = call.ends.get(row)
        return end is not None and (end[2] is None or self._request.options.on_error == "return")

    # -- the end of a call

    def _resolve_rows(self, call: RowsCall) -> None:
        """Handle the end of a call: send missing rows again after a restart, or end the stream."""
        if self._is_closed or not self._claims_end(call):
            return
        blocked_calls.pop(call, None)
        request, error, missing = self._request, call._take_error() or call.failure, self._missing_rows()
        if error is None and missing:
            error = left_out_error(call, len(missing))
        again = [row for row in missing if request.tries.get(row)] if isinstance(error, GroupRestarted) else []
        if again and (again == missing or request.options.on_error == "return"):
            self._set_errors([row for row in missing if row not in again], call, error)
            self._restart_rows(again, call)
        else:
            self._conclude_rows(missing, call, error)

    def _claims_end(self, call: RowsCall) -> bool:
        """Return whether this reader must handle the end of a call, because no other reader has handled it."""
        try:
            self._open_calls.remove(call)
        except ValueError:
            return False
        return True

    def _missing_rows(self) -> list[int]:
        """Return the rows without a result.

        Other threads may read meanwhile, so results are checked before `_done_rows`.
        """
        return [
            row
            for row in range(self._request.count)
            if not (any(self._is_usable(call, row) for call in self._calls) or row in self._done_rows)
        ]

    def _set_errors(self, rows: Sequence[int], call: RowsCall, error: BaseException | None) -> None:
        if isinstance(error, ColocateError):
            for row in rows:
                call.ends[row] = call.targets[0], None, error
                _on_row(self._arrivals, call, row)

    def _conclude_rows(self, missing: Sequence[int], call: RowsCall, error: BaseException | None) -> None:
        if self._request.options.on_error == "return" and isinstance(error, ColocateError):
            self._set_errors(missing, call, error)
        else:
            self._end_cause = self._end_cause or error
        self._arrivals.end_queue()

    def _restart_rows(self, rows: Sequence[int], call: RowsCall) -> None:
        """Send missing rows again, to the workers of the restarted group.

        An error ends the stream for the next reader, because this thread may have stopped reading.
        """
        try:
            self._request.worker_group.restarts.wait_ready(None, notes=False)
            if self._is_closed:
                return
            self._request.send_call(rows, self._is_ahead, self._attach_call, is_again=True)
        except BaseException as error:
            # After an interrupt of this reader, the next reader sends the rows again.
            if not isinstance(error, Exception) or is_of_handler(error):
                self._open_calls.append(call)
                raise
            if self._call is call or self._claims_end(self._call):
                self._conclude_rows(rows, self._call, error)
            return
        if self._is_closed:  # The stream may have been closed before the new call existed.
            self._detach_call(self._call)


def _on_row(arrivals: Arrivals[_EndedRow], call: Any, row: int | None = None) -> None:
    arrivals.put_item((call, row, None))


def _report_failure(worker_group: WorkerGroup, call: PendingCall) -> None:
    """Log the failure of a closed stream's call, because no reader gets the error."""
    error = call._error or call.failure
    if error is None or error is worker_group.failure or (isinstance(error, ColocateError) and error._is_reported):
        return
    if not isinstance(error, (ClosedError, GroupRestarted)):
        text = f"{call.label} of group {worker_group.name!r}, whose stream was closed, has failed: {error}"
        worker_group.services.printer.call_soon(lambda: _log.error(text))
