"""Calls whose rows end one by one: streams, and all rows at once."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from colocate._calls.pending import PendingCall, half_read
from colocate._calls.rows import Flow, GivenRows, RowsCall, YieldedRows, left_out
from colocate._definitions.packed import packed_bytes
from colocate._kept.handles import Consumer, Reference
from colocate._role.call import Call, OnDriver, Resident
from colocate._role.method_spec import MethodSpec
from colocate._role.role import RoleInfo
from colocate._role.rows import OnError, RowStream, check_row_options, no_keep
from colocate._signals.at_work import refuse_to_wait
from colocate._signals.off_main import SLICE_S, off_main, who_waits
from colocate._system.numbers import limit, plural
from colocate._values.batch import each_row, resolve
from colocate._values.dispatch import chosen_ranks, plan
from colocate._values.nesting import no_end
from colocate._views.references import with_references
from colocate._views.sending import Messages, ready, recording, refuse_inside, send_rows
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ClosedError, ColocateError, ConfigError, GroupRestarted

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger("colocate")
_OUT = 2  # rows that are given and not read, at most, for each that can run at once


@attrs.frozen
class RowOptions:
    """With what such a method is called; see `RowCall.options`."""

    timeout: float | None = None
    ranks: Sequence[int] | None = None
    on_error: OnError = "raise"
    retry: int = 0
    sticky: Callable[[Any], object] | None = None


class RowsViewCall(OnDriver):
    """One method of a role whose rows end one by one, on its ranks."""

    __slots__ = ("_label", "_options", "_role", "_spec", "_worker_group")

    def __init__(
        self, worker_group: WorkerGroup, role: RoleInfo, spec: MethodSpec, options: RowOptions | None = None
    ) -> None:
        self._worker_group = worker_group
        self._role = role
        self._spec = spec
        self._options = RowOptions() if options is None else options
        self._label = f"{role.name}.{spec.name}"

    def __call__(self, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run all rows, wait, and return their values in order."""
        with _Stream(self._asked(args, kwargs), is_ahead=False) as rows:  # one that is interrupted is read no more
            ended = dict(rows)
        return [ended[row] for row in range(len(ended))]

    def submit(self, /, *args: Any, **kwargs: Any) -> Call[list[Any]]:
        """Send it and return at once. A failure of the call is its error, and the group's restart ends it."""
        refused = None
        if self._options.retry and self._worker_group.restarts.limit:
            refused = "retry=... in a group that restarts", "is given to its new workers"
        elif self._options.on_error == "return" and self._options.timeout is not None:
            refused = "timeout=... with on_error='return'", "has that error"
        if refused is not None:
            raise ConfigError(
                f"{self._label}.submit(...) with options({refused[0]}): a row that has not ended {refused[1]} only "
                "where rows are read as they end: call it, on a thread of your own perhaps, or read its .stream(...)"
            )
        asked = self._asked(args, kwargs)
        return Call(asked.begin(range(asked.count), is_ahead=False))

    def stream(self, /, *args: Any, **kwargs: Any) -> RowStream[Any]:
        """Send it and return at once: the rows come from the stream as they end."""
        return _Stream(self._asked(args, kwargs), is_ahead=True)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Refuse it."""
        no_keep(self._label)

    def options(
        self,
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        on_error: OnError | None = None,
        retry: int | None = None,
        sticky: Callable[[Any], object] | None = None,
    ) -> RowsViewCall:
        """The same method with other options; see `RowCall.options`."""
        check_row_options(self._spec, self._label, on_error, retry, sticky)
        given: dict[str, Any] = {
            "timeout": limit(timeout, "options(timeout)", positive=True),
            "ranks": None if ranks is None else chosen_ranks(ranks),
            "on_error": on_error,
            "retry": retry,
            "sticky": sticky,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        return type(self)(self._worker_group, self._role, self._spec, attrs.evolve(self._options, **changed))

    def __repr__(self) -> str:
        return f"<{self._label}{self._spec.signature} of group {self._worker_group.name!r}>"

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Asked:
        """Have everything found out that can't be sent, before anything is.

        Residents among the rows are fetched: it is the driver that gives rows to ranks, and knows which are whose.
        """
        worker_group, role, spec, label = self._worker_group, self._role, self._spec, self._label
        worker_group.check()
        refuse_inside(label, worker_group.name)
        if (pipeline := recording(worker_group)) is not None:
            pipeline.refuse_call(label)
        refuse_to_wait(label)
        arguments = spec.bind(args, kwargs)
        named = (spec.rows,) if spec.rows is not None else getattr(spec.dispatch, "parameters", ())
        with_rows = {name: arguments[name] for name in named if name in arguments}
        consumer, fetched = Consumer(worker_group.name, role.slots, role.ranks.mesh), list[Reference]()
        try:
            with_rows = with_references(with_rows, worker_group, consumer, label, fetched)
            if fetched:
                with_rows = resolve(with_rows, lambda leaf: leaf.fetch())
            arguments |= with_rows
            if spec.rows is None:
                return _Asked(worker_group, role, spec, label, self._options, consumer, arguments)
            rows = each_row(arguments.pop(spec.rows), spec.rows)
        except RecursionError:
            if (error := no_end(arguments, label)) is not None:
                raise error from None
            raise
        sticky, codec = self._options.sticky, worker_group.services.executor.codec
        keys = None if sticky is None else {index: _key(sticky(row), label) for index, row in enumerate(rows)}
        bodies = {
            index: codec.pack_arguments({spec.rows: row}, f"{label}, row {index}") for index, row in enumerate(rows)
        }
        asked = _Asked(worker_group, role, spec, label, self._options, consumer, arguments, len(rows), bodies, keys)
        asked.tries.update(dict.fromkeys(bodies, self._options.retry + 1))
        return asked


def _key(key: Any, label: str) -> Hashable:
    try:
        hash(key)
    except TypeError:
        raise TypeError(f"{label}: options(sticky=...) has made the key {key!r}, which has no hash") from None
    found: Hashable = key
    return found


@attrs.define(eq=False)
class _Asked:
    """What was asked for, of which a call is made, and perhaps another one when the group has been restarted."""

    worker_group: WorkerGroup
    role: RoleInfo
    spec: MethodSpec
    label: str
    options: RowOptions
    consumer: Consumer
    arguments: Mapping[str, Any]  # without the rows that are given one by one
    count: int = 0  # how many rows there are; of those that ranks get at once it is known when they are split
    bodies: dict[int, Any] = attrs.field(factory=dict)
    keys: Mapping[int, Hashable] | None = None
    tries: dict[int, int] = attrs.field(factory=dict)
    at: Any = None  # the line that has asked

    def begin(
        self,
        rows: Sequence[int],
        is_ahead: bool,
        prepare: Callable[[RowsCall], object] = lambda call: None,
        is_again: bool = False,
    ) -> RowsCall:
        """Send a call of some of the rows.

        Args:
            rows: Those that are given one by one.
            is_ahead: Whether they are read one by one, and as many run ahead of that.
            prepare: Is told of the call before it is sent.
            is_again: Whether an earlier one has ended with the group's restart, of which others are to be told yet.
        """
        worker_group, role, spec = self.worker_group, self.role, self.spec
        uses: list[Reference] = []
        arguments = with_references(dict(self.arguments), worker_group, self.consumer, self.label, uses)
        planned = plan(spec.dispatch, arguments, role.ranks, self.options.ranks)
        targets: Sequence[int] = role.slots
        if not isinstance(planned.targets, range):
            targets = [targets[rank] for rank in planned.targets]
        lock = worker_group.order.lock
        where = self.label, role.name, spec.name, targets, planned.targets, lock, self.options.on_error
        call: RowsCall
        if spec.rows is not None:
            ahead = _OUT * spec.concurrency * len(targets) if is_ahead else None
            flow = Flow(rows, targets, spec.concurrency, ahead, self.keys, self.tries)
            call = GivenRows(*where, self.count, flow=flow, bodies=self.bodies)
        else:
            places: dict[int, Sequence[int]] = {}
            self.count = 0
            for rank in spec.collect.sources(role.ranks):
                size = planned.valid[rank] or 0
                own = range(self.count, self.count + size) if planned.partition is None else planned.partition[rank]
                places[role.slots[rank]] = own
                self.count += size
            call = YieldedRows(*where, self.count, places=places, is_ahead=is_ahead)
        prepare(call)
        draft = ready(worker_group, call, role, spec, planned, uses, self.options.timeout)
        self.at = call.at = self.at or call.at
        if worker_group.services.observers and not worker_group.services.executor.in_process:
            call.sent += sum(packed_bytes(self.bodies[row]) for row in rows) if spec.rows is not None else 0
        messages = Messages((draft,))
        off_main(lambda: send_rows(messages, call.begin, is_again), call.withdraw, waits_s=None)
        return call


class _Arrivals:
    """Rows that have ended, on their way to who reads them: their indices, and None when the call is over."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def put(self, row: int | None) -> None:
        """Have one read. On any thread; it doesn't block."""
        self._queue.put(row)
        if (wake := self._wake) is not None:
            wake()

    def over(self, call: object) -> None:
        """The call is."""
        self.put(None)

    def get(self, before_waiting: Callable[[], object]) -> int | None:
        """Wait for the next one."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            before_waiting()
        while True:
            try:
                return self._queue.get(timeout=SLICE_S)  # as a signal that comes just before isn't seen until it ends
            except queue.Empty:
                continue

    async def get_async(self, before_waiting: Callable[[], object]) -> int | None:
        """Await it."""
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            come: asyncio.Future[None] = loop.create_future()
            self._wake = partial(_wake, loop, come)
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                before_waiting()
                await come
            finally:
                self._wake = None


def _wake(loop: asyncio.AbstractEventLoop, come: asyncio.Future[None]) -> None:
    def set_it() -> None:
        if not come.done():
            come.set_result(None)

    if not loop.is_closed():
        loop.call_soon_threadsafe(set_it)


class _Reader:
    """Who has read a stream last; while nobody has, the thread that has opened it, where that blocks."""

    def __init__(self) -> None:
        self._thread = weakref.ref(threading.current_thread())  # idents are used again
        self._task: weakref.ref[Any] | None = None

    def note(self) -> None:
        """It is who asks."""
        self._thread, self._task = weakref.ref(threading.current_thread()), _task()

    def is_here(self, awaits: bool) -> bool:
        """See `pending.Reader`."""
        if self._thread() is not who_waits():
            return False
        return not awaits or (self._task is not None and self._task == _task())


def _task() -> weakref.ref[Any] | None:
    asyncio = sys.modules.get("asyncio")
    try:
        task = None if asyncio is None else asyncio.current_task()
    except (RuntimeError, AttributeError):  # no loop runs here; or another thread just imports it
        return None
    return None if task is None else weakref.ref(task)


class _Stream(RowStream[Any]):
    """The rows of a call on the driver."""

    def __init__(self, asked: _Asked, is_ahead: bool) -> None:
        self._is_over = self._is_closed = False
        self._asked = asked
        self._is_ahead = is_ahead
        self._arrivals = _Arrivals()
        self._reader = _Reader()
        self._done: set[int] = set()
        self._lost: deque[tuple[int, ColocateError]] = deque()  # errors of rows that won't come
        self._never_again: BaseException | None = None  # why no other call was begun
        self._call: RowsCall
        try:
            asked.begin(range(asked.count), is_ahead, self._hear)
        except BaseException:
            self._end()
            raise
        if len(self._done) == asked.count:
            half_read.pop(self._call, None)

    def _hear(self, call: RowsCall) -> None:
        """A call is about to be sent: from now on its rows come here."""
        self._call = call
        call.is_read, call.heard = True, self._arrivals.put
        call._then(self._arrivals.over)
        if self._is_ahead:
            half_read[call] = self._reader

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._done)} of {plural(self._asked.count, 'row')} read"
        return f"<stream of {self._asked.label}, {state}>"

    def __next__(self) -> tuple[int, Any]:
        self._reader.note()
        while (found := self._known()) is None:
            row = self._arrivals.get(partial(self._before_waiting, awaits=False))
            if row is not None:
                found = self._take(row)
            elif self._begins_anew():
                self._begin_anew()
            if found is not None:
                break
        return found

    async def __anext__(self) -> tuple[int, Any]:
        self._reader.note()
        try:
            while (found := self._known()) is None:
                row = await self._arrivals.get_async(partial(self._before_waiting, awaits=True))
                if row is not None:
                    found = self._take(row)
                elif self._begins_anew():
                    import asyncio

                    await asyncio.to_thread(self._begin_anew)
                if found is not None:
                    break
        except StopIteration:
            raise StopAsyncIteration from None
        return found

    def close(self) -> None:
        """See `RowStream.close`."""
        if self._is_over or self._is_closed:
            return
        self._is_closed = True  # first: who makes another call meanwhile looks at it afterwards
        self._let_go(self._call)
        self._arrivals.put(None)  # another thread may wait

    def _let_go(self, call: RowsCall) -> None:
        """Nobody reads its rows any more."""
        worker_group = self._asked.worker_group
        half_read.pop(call, None)
        if worker_group.forked:
            return
        if not call.done():
            worker_group.services.timers.soon(call.withdraw)
        call._then(partial(_tell_failure, worker_group))

    def __del__(self) -> None:
        with suppress(AttributeError, RuntimeError):  # it was never sent; the interpreter ends
            self.close()

    # -- what comes next

    def _known(self) -> tuple[int, Any] | None:
        """The error of a row that won't come, if there is one.

        Raises:
            StopIteration: No row will come.
        """
        self._call._check_fork()
        if self._is_closed:
            raise ClosedError(f"the stream of {self._asked.label} was closed, and is read")
        if self._lost:
            return self._lost.popleft()
        if self._is_over:
            raise StopIteration
        return None

    def _before_waiting(self, awaits: bool) -> None:
        if not awaits:
            refuse_to_wait(self._asked.label)
        if half_read:
            self._call.refuse_behind_stream(awaits)

    def _take(self, row: int) -> tuple[int, Any] | None:
        """The value of a row that has ended; None of one whose error is raised when the call has ended."""
        if self._is_closed or (self._call.ends[row][2] is not None and self._asked.options.on_error == "raise"):
            return None
        try:
            value = self._call.take(row)
        except BaseException:  # as when it has raised: the others end
            self.close()
            self._is_over, self._is_closed = True, False
            raise
        self._done.add(row)
        if len(self._done) == self._asked.count:
            half_read.pop(self._call, None)
        return row, value

    def _begins_anew(self) -> bool:
        """The call is over: note what becomes of the rows that haven't ended, and whether they begin once more.

        Raises:
            ColocateError: Why they won't come.
        """
        asked, call, error = self._asked, self._call, self._never_again
        if self._is_closed or (error is None and not call.done()):  # of another one it was noted before
            return False
        self._never_again = None
        error = error or call._failure() or call.failure
        missing = [row for row in range(asked.count) if row not in self._done]
        if error is None and missing:
            error = left_out(call, len(missing))
        again = isinstance(error, GroupRestarted) and any(asked.tries.get(row) for row in missing)
        half_read.pop(call, None)
        if error is not None and asked.options.on_error == "return" and isinstance(error, ColocateError):
            lost = [row for row in missing if not (again and asked.tries[row])]
            self._lost.extend((row, error) for row in lost)
            self._done.update(lost)
        elif error is not None and not (again and all(asked.tries[row] for row in missing)):
            self._is_over = True
            raise error
        self._is_over = not again
        return again

    def _begin_anew(self) -> None:
        """The group was restarted: its workers are given the rows that had not ended.

        Why not is told to who reads next: who waits for this may have given up.
        """
        try:
            self._asked.worker_group.restarts.wait(None, notes=False)
            if self._is_closed:
                return
            rows = [row for row in range(self._asked.count) if row not in self._done]
            self._asked.begin(rows, self._is_ahead, self._hear, is_again=True)
        except BaseException as error:
            self._never_again = error
            self._arrivals.put(None)
            return
        if self._is_closed:  # meanwhile, perhaps before there was this call
            self._let_go(self._call)

    def _end(self) -> None:
        self._is_over = True
        if (call := getattr(self, "_call", None)) is not None:  # one has been made
            half_read.pop(call, None)


def _tell_failure(worker_group: WorkerGroup, call: PendingCall) -> None:
    """The call of a stream that was closed is over: nobody else is told that it has failed."""
    error = call._error or call.failure
    if error is None or error is worker_group.failure or (isinstance(error, ColocateError) and error._told):
        return
    if not isinstance(error, (ClosedError, GroupRestarted)):
        text = f"{call.label} of group {worker_group.name!r}, whose stream was closed, has failed: {error}"
        worker_group.services.printer.soon(lambda: _log.error(text))
