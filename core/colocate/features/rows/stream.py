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

from colocate._calls.pending import PendingCall, held_open
from colocate._signals.arrivals import Arrivals
from colocate._signals.deferred import settle, who_waits
from colocate._signals.in_framework import refuse_to_wait
from colocate._system.numbers import plural
from colocate._system.tracebacks import is_of_handler
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ClosedError, ColocateError, GroupRestarted
from colocate.features.rows.calls import Asked, RowsCall, left_out
from colocate.features.rows.row_stream import RowStream

_log = logging.getLogger("colocate")
_SETTLES_WITHIN_S = 0.1
_Ended: TypeAlias = tuple[RowsCall, int | None, tuple[int, Any] | None]
"""A call, an ended row, and the unpacked item if there is one already. If the row is None, the call has ended."""


class _Reader:
    """A record of the thread and task that last read a stream.

    Before the first read, the thread that created the stream counts as the reader.
    """

    def __init__(self) -> None:
        # Thread ids aren't stored, because the system reuses ids.
        self._thread = weakref.ref(threading.current_thread())
        self._task: weakref.ref[Any] | None = None

    def note(self) -> None:
        self._thread, self._task = weakref.ref(threading.current_thread()), _task()

    def refuse(self, stream: PendingCall, waiting: PendingCall, awaits: bool) -> None:
        """Raise an error if the stream's only reader is about to wait for a call that comes after the stream.

        The wait would never end, because nobody would read the stream. The check includes calls on which the awaited
        call depends: the calls that made the call's residents, and earlier calls with such dependencies.
        """
        if self._thread() is not who_waits() or (awaits and (self._task is None or self._task != _task())):
            return
        for call in _awaited(waiting):
            if not _is_behind(call, stream):
                continue
            # The stream may be garbage, with references only from an exception's frames or from pending callbacks.
            settle(_SETTLES_WITHIN_S)
            gc.collect()
            if stream not in held_open or stream.done():
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


def _awaited(waiting: PendingCall) -> list[PendingCall]:
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
    """Return whether a call comes after another call in the order of a lane, on some rank."""
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


def _task() -> weakref.ref[Any] | None:
    asyncio = sys.modules.get("asyncio")
    try:
        task = None if asyncio is None else asyncio.current_task()
    except (RuntimeError, AttributeError):  # No event loop runs here, or another thread is importing asyncio.
        return None
    return None if task is None else weakref.ref(task)


class Stream(RowStream[Any]):
    """The driver's stream of the rows of a call, which continues after a restart of the group."""

    def __init__(self, asked: Asked, is_ahead: bool) -> None:
        self._is_closed = self._is_told = False
        self._asked = asked
        self._is_ahead = is_ahead
        self._arrivals: Arrivals[_Ended] = Arrivals()
        self._reader = _Reader()
        self._done: set[int] = set()
        self._why: BaseException | None = None  # The error that ended the stream; None if there is none.
        self._call: RowsCall
        self._calls: list[RowsCall] = []  # The current call, and calls before a restart.
        self._unended: list[RowsCall] = []  # Calls that are running, or have an end that no reader has handled.
        try:
            asked.begin(range(asked.count), is_ahead, self._hear)
        except BaseException:
            self._arrivals.end()
            if (call := getattr(self, "_call", None)) is not None:  # A call was created, and perhaps sent.
                held_open.pop(call, None)
                asked.worker_group.services.timers.soon(call.withdraw)
            raise
        if len(self._done) == asked.count:
            held_open.pop(self._call, None)

    def _hear(self, call: RowsCall) -> None:
        """Connect a new call with this stream, before the call is sent."""
        self._call = call
        self._calls.append(call)
        self._unended.append(call)
        call.is_read, call.heard = True, partial(_heard, self._arrivals)
        call._then(call.heard)
        if self._is_ahead:
            held_open[call] = self._reader.refuse

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._done)} of {plural(self._asked.count, 'row')} read"
        return f"<stream of {self._asked.label}, {state}>"

    def __next__(self) -> tuple[int, Any]:
        self._reader.note()
        mine: deque[_Ended] = deque()
        end: BaseException | None = None
        waits = False
        try:
            while (end := self._end(StopIteration, waits)) is None:
                if not self._arrivals.take(mine):
                    self._before_waiting(awaits=False)
                    waits = True
                    self._arrivals.wait()
                elif (result := self._taken(mine)) is not None:
                    return result
                elif mine:
                    self._see_to_end(mine[0][0])
                    mine.clear()
            raise end
        except BaseException as error:
            self._arrivals.come.extendleft(mine)  # Items are put back first, so that no item is lost (see `Arrivals`).
            # `end` refers to this frame, which would be a reference cycle.
            self._is_told, end = self._is_told or error is end, None
            self._arrivals.wake()
            raise

    async def __anext__(self) -> tuple[int, Any]:
        self._reader.note()
        mine: deque[_Ended] = deque()
        end: BaseException | None = None
        waits = False
        try:
            while (end := self._end(StopAsyncIteration, waits)) is None:
                if not self._arrivals.take(mine):
                    self._before_waiting(awaits=True)
                    waits = True
                    await self._arrivals.wait_async()
                elif (result := self._taken(mine)) is not None:
                    return result
                elif mine:
                    import asyncio

                    await asyncio.to_thread(self._see_to_end, mine[0][0])
                    mine.clear()
            raise end
        except BaseException as error:
            self._arrivals.come.extendleft(mine)  # Items are put back first, so that no item is lost (see `Arrivals`).
            self._is_told, end = self._is_told or error is end, None
            self._arrivals.wake()
            raise

    def close(self) -> None:
        """Stop reading, withdraw the call, and notify all waiting readers (see `RowStream.close`)."""
        if self._is_closed or self._arrivals.is_over:
            return
        self._is_closed = True  # The flag is set first, because a new call after a restart checks this flag later.
        self._let_go(self._call)
        self._arrivals.end()  # Other readers may be waiting.

    def _let_go(self, call: RowsCall) -> None:
        """Withdraw a call that nobody reads any more, and log a failure of the call."""
        worker_group = self._asked.worker_group
        held_open.pop(call, None)
        if worker_group.forked:
            return
        if not call.done():
            worker_group.services.timers.soon(call.withdraw)
        call._then(partial(_tell_failure, worker_group))

    def __del__(self) -> None:
        with suppress(AttributeError, RuntimeError):  # The call was never sent, or the interpreter is ending.
            self.close()

    # -- what comes next

    def _end(self, kind: type[BaseException], waits: bool) -> BaseException | None:
        """Return the exception for a reader if no row will come: first the stream's error, later a plain stop."""
        self._call._check_fork()
        if self._is_closed:
            return ClosedError(f"the stream of {self._asked.label} was closed, and is read")
        if not self._arrivals.is_over or self._arrivals.come:
            return None
        if self._why is None or (self._is_told and not waits):
            return kind()
        return copy.copy(self._why) if isinstance(self._why, ColocateError) else self._why

    def _before_waiting(self, awaits: bool) -> None:
        self._call.tell_read()
        if not awaits:
            refuse_to_wait(self._asked.label)
        if held_open:
            self._call.refuse_in_vain(awaits)

    def _taken(self, mine: deque[_Ended]) -> tuple[int, Any] | None:
        """Return the row that a reader has taken. None for the end of a call, or if the value can't be rebuilt."""
        call, row, result = mine[0]
        if row is None:
            return None
        if result is None:
            if not self._is_usable(call, row):
                mine.clear()
                return None
            try:
                mine[0] = call, row, (result := (row, call.value_of(row)))
            except ColocateError as error:
                if is_of_handler(error):
                    raise
                self._why = error  # The value can't be rebuilt, so the other rows are dropped.
                self._let_go(call)
                self._arrivals.come.clear()
                self._arrivals.end()
                mine.clear()
                return None
        self._done.add(row)
        call.note_read(row)
        if len(self._done) == self._asked.count:
            held_open.pop(call, None)
        return result

    def _is_usable(self, call: RowsCall, row: int) -> bool:
        end = call.ends.get(row)
        return end is not None and (end[2] is None or self._asked.options.on_error == "return")

    # -- the end of a call

    def _see_to_end(self, call: RowsCall) -> None:
        """Handle the end of a call: send missing rows again after a restart, or end the stream."""
        if self._is_closed or not self._claims(call):
            return
        held_open.pop(call, None)
        request, error, missing = self._asked, call._failure() or call.failure, self._missing()
        if error is None and missing:
            error = left_out(call, len(missing))
        again = [row for row in missing if request.tries.get(row)] if isinstance(error, GroupRestarted) else []
        if again and (again == missing or request.options.on_error == "return"):
            self._give_up([row for row in missing if row not in again], call, error)
            self._begin_anew(again, call)
        else:
            self._conclude(missing, call, error)

    def _claims(self, call: RowsCall) -> bool:
        """Return whether this reader must handle the end of a call, because no other reader has."""
        try:
            self._unended.remove(call)
        except ValueError:
            return False
        return True

    def _missing(self) -> list[int]:
        """Return the rows without a result.

        Other threads may read meanwhile, so results are checked before `_done`.
        """
        return [
            row
            for row in range(self._asked.count)
            if not (any(self._is_usable(call, row) for call in self._calls) or row in self._done)
        ]

    def _give_up(self, rows: Sequence[int], call: RowsCall, error: BaseException | None) -> None:
        if isinstance(error, ColocateError):
            for row in rows:
                call.ends[row] = call.targets[0], None, error
                _heard(self._arrivals, call, row)

    def _conclude(self, missing: Sequence[int], call: RowsCall, error: BaseException | None) -> None:
        if self._asked.options.on_error == "return" and isinstance(error, ColocateError):
            self._give_up(missing, call, error)
        else:
            self._why = self._why or error
        self._arrivals.end()

    def _begin_anew(self, rows: Sequence[int], call: RowsCall) -> None:
        """Send missing rows again, to the workers of the restarted group.

        An error ends the stream for the next reader, because this thread may have stopped reading.
        """
        try:
            self._asked.worker_group.restarts.wait(None, notes=False)
            if self._is_closed:
                return
            self._asked.begin(rows, self._is_ahead, self._hear, is_again=True)
        except BaseException as error:
            if not isinstance(error, Exception) or is_of_handler(error):  # The next reader sends the rows again.
                self._unended.append(call)
                raise
            if self._call is call or self._claims(self._call):
                self._conclude(rows, self._call, error)
            return
        if self._is_closed:  # The stream may have been closed before the new call existed.
            self._let_go(self._call)


def _heard(arrivals: Arrivals[_Ended], call: Any, row: int | None = None) -> None:
    arrivals.put((call, row, None))


def _tell_failure(worker_group: WorkerGroup, call: PendingCall) -> None:
    """Log the failure of a closed stream's call, because no reader gets the error."""
    error = call._error or call.failure
    if error is None or error is worker_group.failure or (isinstance(error, ColocateError) and error._told):
        return
    if not isinstance(error, (ClosedError, GroupRestarted)):
        text = f"{call.label} of group {worker_group.name!r}, whose stream was closed, has failed: {error}"
        worker_group.services.printer.soon(lambda: _log.error(text))
