"""A lane: a thread that runs role code in the order of `lane_order`. Each background role has a lane of its own."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import attrs

from colocate._protocol.message import Message
from colocate._protocol.taken import Receipt
from colocate._protocol.to_worker import Call
from colocate._role.context import CallState, RowState
from colocate._system.threads import Thread
from colocate._values.leaving import Watch
from colocate.wire import SocketLane, Turns
from colocate.worker import lane_order
from colocate.worker.lane_order import LaneOrder
from colocate.worker.serving.scope import Scope

if TYPE_CHECKING:
    import asyncio

    from colocate.worker.serving.tasks import Tasks


@attrs.define(eq=False)
class Work(CallState):
    """One call that a lane runs. `run` returns whether the call succeeded, or a coroutine with that result.

    If `run` returns None, the lane queues the call again.
    """

    is_barrier: ClassVar[bool] = False

    # One instance is made per call. For speed, fields are passed by position, and fields with a default aren't passed.
    run: Callable[[Work], bool | Coroutine[Any, Any, bool] | None]
    label: str
    message: Message | None = None
    body: Any = None
    concurrency: int = 0  # Limit of overlapping calls of an async method; 0 for a sync method, which runs alone.
    spec: Any = None  # The method's spec; None while roles are constructed.
    rows: int | None = attrs.field(default=None, init=False)
    role: Any = attrs.field(default=None, init=False)  # The worker's instance of the called role.
    on_drop: Callable[[], None] | None = attrs.field(default=None, init=False)
    # Whether the await was cancelled because nobody waits for the call's result.
    is_abandoned: bool = attrs.field(default=False, init=False)
    # Value that `Device.begin_call` returned before the call.
    allocated_before: int | None = attrs.field(default=None, init=False)
    # Number of definition bundles that arrived before this call.
    bundles_seen: int = attrs.field(default=0, init=False)
    began: float = attrs.field(default=0.0, init=False)  # Start of the call, as a value of time.time().
    # Parts of residents that this call has read so far.
    transfers: Sequence[Receipt] | None = attrs.field(default=None, init=False)
    used_residents: Sequence[int] = attrs.field(default=(), init=False)  # Keys of the residents among the arguments.
    # Arguments that are checked for writes in place.
    watches: Mapping[str, Watch] = attrs.field(factory=dict, init=False)
    # Error that a signal handler raised during an async method's await.
    pending_error: BaseException | None = attrs.field(default=None, init=False)
    # Number of running tasks of the call, including tasks for rows.
    active_tasks: int = attrs.field(default=1, init=False)
    paused_tasks: int = attrs.field(default=0, init=False)  # Number of the call's tasks that rest at a pause point.

    @property
    def ends_at_once(self) -> bool:
        """Whether features are notified once, at the end of the whole call, and not at the end of each row."""
        return True

    @property
    def may_wait(self) -> bool:
        """Whether role code may be running or awaited in the call now. A call on rows may have no running row."""
        return True

    def describe_awaits(self, frames: Sequence[FrameType]) -> Sequence[tuple[str, Sequence[FrameType]]]:
        """Return the names and frames of the places where the call waits. `frames` are those of the call's own task."""
        return [(self.label, frames)]

    def fail_awaits(self, tasks: Tasks, error: Callable[[], BaseException], row: RowState | None) -> None:
        """Fail the call with an error, and cancel the await. Args: row: The only row to fail, if the call has rows."""
        self.pending_error = error()
        tasks.cancel_task(self.seq)

    def drop_call(self) -> None:
        """Finish a call that never begins. The role still counts the call, so that counts agree on all ranks."""
        if self.role is not None and isinstance(self.message, Call):
            self.role.ctx.number_call(self, self.message.method)
        if self.on_drop is not None:
            self.on_drop()

    def release_values(self) -> None:
        """Drop references to users' objects when the call has ended. The role and its tasks still refer to the call."""
        self.watches, self.pending_error, self.role = {}, None, None


class BarrierWork(Work):
    """A placeholder for a call of another lane. This lane stands still while that call runs."""

    is_barrier = True


@attrs.frozen
class _Abandonment:
    first: int
    last: int


@attrs.frozen
class _LaneChange:
    lane: SocketLane


@attrs.frozen
class _Action:
    act: Callable[[], object]


_Item: TypeAlias = "tuple[Message, Any] | Work | lane_order.Item | _Abandonment | _LaneChange | _Action | None"
_NEVER = sys.maxsize


class Lane:
    """Runs calls in order on one thread.

    Another thread receives messages, queues calls, and calls `hold` and `resume`. An idle lane may receive messages
    itself.
    """

    def __init__(
        self,
        name: str,
        scope: Scope,
        on_held: Callable[[int, int], None],
        on_broken: Callable[[BaseException], None] = lambda error: None,
        turns: Turns | None = None,
        own_thread: bool = True,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the lane's own thread. With `own_thread=False`, the main thread must call `run` instead.

        Args:
            name: Name of the lane's own thread.
            scope: Which drivers' calls count, and whether the worker ends.
            on_held: Called on the lane with (hold, last begun call) once this rank has reached the hold's barrier.
            on_broken: Called on the lane when it ends by an exception: a bug here, as roles can't cause any.
            turns: Receives messages on the idle lane itself; None if other threads always do.
            own_thread: Whether the lane has its own thread. The process doesn't wait for this thread, nor for threads
                that role code starts there.
            on_end: Called on the lane after the last call.
        """
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._on_end = on_end
        self._on_held = on_held
        self._on_broken = on_broken
        self._scope = scope
        self._turns = turns
        self._order = LaneOrder(scope)
        self.running = self._order.running
        self.tasks: Tasks | None = None  # Created when role code first needs an event loop.
        self._places = 0
        self._over = threading.Event()
        self.thread = threading.main_thread()
        if own_thread:
            self.thread = Thread(target=self.run, name=name)
            self.thread.start()

    @property
    def last_hold(self) -> int:
        """Number of the last hold for which this lane has reached the barrier."""
        return self._order.last_reported

    def get_last_work(self) -> Work | None:
        """Return the running call with the highest number, or None. May be called from any thread."""
        running = dict(self.running)
        return running[max(running)] if running else None

    def list_started(self) -> list[Work]:
        """Return the running calls. May be called from any thread."""
        return [work for work in dict(self.running).values() if work.began]

    @property
    def waiting_count(self) -> int:
        """Approximate number of queued calls and other items. May be read from any thread."""
        return self._order.waiting_count + self._queue.qsize()

    # -- from the receiving thread

    def hold(self, number: int, failed: int) -> None:
        """Begin neither the failed call nor any later call, and cancel the failed call.

        Roles are still constructed (call 0), so that every rank with a failing constructor reports the failure.
        """
        item = self._order.hold(number, failed)
        self.abandon_calls(failed, failed)
        self.enqueue(item)

    @property
    def last_resumed(self) -> int:
        """Number of the last finished hold. When a call begins, all ranks have the same number."""
        return self._order.last_resumed

    def defer_call(self, token: int, seq: int) -> bool:
        """Hold up a call until the driver decides whether to withdraw it. Return whether the call hadn't begun yet."""
        return self._order.defer_call(token, seq)

    def decide_deferred(self, token: int, dropped: int | None) -> None:
        """Continue after `defer_call`, and drop the call with number `dropped` if there is one."""
        self.enqueue(lane_order.Decision(token, dropped))

    def cancel_calls(self, first: int, last: int) -> None:
        """Mark the running calls from `first` to `last` as cancelled.

        Role code may check the mark; results still count.
        """
        rest = False
        for seq, work in list(self.running.items()):
            work.cancelled, rest = work.cancelled or first <= seq <= last, rest or work.paused_tasks > 0
        if rest:
            self.wake_lane()

    def abandon_calls(self, first: int, last: int) -> None:
        """Cancel the calls from `first` to `last`, for which nobody waits. Running calls end as soon as possible."""
        self.cancel_calls(first, last)
        self.enqueue(_Abandonment(first, last))

    def stop_beginning(self) -> None:
        """Begin no more calls for a driver that is about to close. Running calls get a grace period."""
        self._order.stop_beginning()
        self.cancel_calls(0, _NEVER)

    def run_action(self, action: Callable[[], object]) -> None:
        """Run an action on the lane, even during a hold. The action isn't a call, and must not raise."""
        self.enqueue(_Action(action))

    def resume(self, number: int, withdrawn: frozenset[int]) -> None:
        """Continue after a hold. Drop the calls that the driver has withdrawn."""
        self.enqueue(lane_order.Resume(number, withdrawn))

    def pause(self, number: int) -> int:
        """Begin no further call, and return the last begun call's number. Call `pause_after` or `end_pause` next."""
        return self._order.pause(number)

    def pause_after(self, number: int, last: int, keeps: bool, on_rest: Callable[[], object]) -> None:
        """Begin no call after call `last` until `end_pause` ends the pause.

        Args:
            number: Number of the pause.
            last: Number of the last call to begin.
            keeps: Whether running calls may stop at their pause points.
            on_rest: Called on the lane once nothing runs here.
        """
        self.enqueue(lane_order.Pause(number, last, keeps, on_rest))

    def end_pause(self, number: int) -> None:
        """End a pause, so that the lane begins calls again."""
        self.enqueue(lane_order.EndPause(number))

    def forget_driver(self) -> None:
        """Drop the calls of a driver that has released the worker. The next driver's calls have higher numbers."""
        base = self._scope.base
        self.abandon_calls(0, base)
        self.enqueue(lane_order.DriverChange(base))

    def take_unfinished(self) -> list[tuple[int, str]]:
        """Return number and label of the calls that former drivers left unfinished. Each call is returned only once.

        Must run on the lane.
        """
        calls, self._order.unfinished = self._order.unfinished, []
        return [(call.seq, call.label) for call in calls if call.seq]

    def use_lane(self, lane: SocketLane) -> None:
        """Receive messages from a new connection to a driver from now on."""
        self.enqueue(_LaneChange(lane))

    def interrupt_last(self, error: BaseException) -> bool:
        """Fail the last running async call with an error, and cancel the await. Return False if no call runs.

        Must run on the lane, between the steps of async calls.
        """
        work = self.get_last_work()
        if work is None or self.tasks is None:
            return False
        work.pending_error = error
        self.tasks.cancel_task(work.seq)
        return True

    def on_call_ending(self) -> None:
        """Prepare to receive messages on the lane, because a sync call is about to end. Must run on the lane."""
        # If calls are queued already, the lane needn't wait for a message.
        if self._turns is not None and not (self._order.waiting_count or self.tasks):
            self._turns.take_turn()

    def on_waiting(self) -> None:
        """Hand the receiving of messages back to the receiving thread, because the lane is about to wait.

        This undoes `on_call_ending`.
        """
        if self._turns is not None and threading.current_thread() is self.thread:
            self._turns.end_turn()

    def join(self) -> None:
        """Wait until the lane has ended."""
        self._over.wait()
        if self.thread is not threading.main_thread():
            self.thread.join()

    def close(self) -> None:
        """End the lane after the running calls, and drop queued work. The scope must be closed first.

        Running calls have a grace period in which their results still count, and in which async methods may await.
        """
        self.cancel_calls(0, _NEVER)
        self.enqueue(None)

    def notify_news(self) -> None:
        """Wake the lane for a new item, in case the lane waits on a socket or an event loop instead of the queue."""
        if self._turns is not None:
            self._turns.notify_news()
        if self.tasks is not None:
            self.tasks.notify_news()

    def enqueue(self, item: _Item) -> None:
        """Queue a call or another item, and wake the lane."""
        self._queue.put(item)
        self.notify_news()

    # -- on the lane

    def run(self) -> None:
        """Run the lane until `close`."""
        try:
            while (work := self._wait_for_call()) is not None:
                if self._order.begin_call(work, len(self.tasks or ())):
                    if work.concurrency:
                        self._start_async(work)
                    else:
                        self._run_work(work)
                del work  # This frees the arguments, which may be large.
        except BaseException as error:
            self._on_broken(error)
        finally:
            if self._turns is not None:
                self._turns.end_turn()
            self._on_end()  # The loop is closed after this, because roles may end work in the loop.
            if self.tasks is not None:
                self.tasks.close()
            self._over.set()

    def _wait_for_call(self) -> Work | None:
        while True:
            if self._can_take_next():  # Nearly always, the next item in the queue is the next call.
                item = self._queue.get()
                if isinstance(item, Work):
                    return item
                self._handle_item(item)
            if self._scope.closed is not None and not self.tasks:
                return None
            if (work := self._order.pop_next(len(self.tasks or ()))) is not None:
                return work
            self._report_idle(len(self.tasks or ()))
            self._wait_for_event()

    def _report_idle(self, runs: int) -> None:
        """Report a hold or pause that this lane has reached. `runs` is the number of running calls."""
        if (back := self._order.take_hold_report(runs)) is not None:
            self._on_held(*back)
        if (pause := self._order.take_rest_report(runs)) is not None:
            pause.on_rest()

    def _can_take_next(self) -> bool:
        """Return whether nothing runs, waits or is held, and an item has arrived."""
        if self._is_loop_active() or self._scope.closed is not None or not self._order.is_clear:
            return False
        return self._turns is None or self._turns.receive_until(self._has_news)

    def _wait_for_event(self) -> None:
        if self._is_loop_active():
            assert self.tasks is not None
            if self._turns is not None:
                self._turns.end_turn()
            self.tasks.run_until_news()
            self._handle_queued()
            return
        if self._turns is not None:
            self._turns.receive_until(self._has_news)
        self._handle_item(self._queue.get())
        self._handle_queued()

    def _is_loop_active(self) -> bool:
        """Return whether calls await something, or whether role code has left work in the loop."""
        if self.tasks is None:
            if "asyncio" not in sys.modules:
                return False
            return self._get_tasks().is_active()  # Role code may have used an event loop before the first async call.
        return len(self.tasks) > 0 or self.tasks.is_active()

    def _has_news(self) -> bool:
        return not self._queue.empty()

    def _handle_queued(self) -> None:
        while self._has_news():  # No other thread takes items from the queue.
            self._handle_item(self._queue.get())

    def _handle_item(self, item: _Item) -> None:
        if isinstance(item, _Abandonment):
            self._abandon(item.first, item.last)
        elif isinstance(item, _Action):
            item.act()
        elif isinstance(item, _LaneChange):
            if self._turns is not None:
                self._turns.use_lane(item.lane)
        elif item is not None and not isinstance(item, tuple):
            self._order.handle_item(item)
        if self.tasks:
            self.tasks.end_rests()

    def _run_work(self, work: Work) -> None:
        try:
            is_done = work.run(work)
            if is_done is None:
                self._order.put_back(work)
            elif not is_done:
                self._order.on_failed(work)
        finally:
            del self.running[work.seq]

    # -- pause points

    def is_pausing(self) -> bool:
        """Return whether the running call should stop at the next pause point."""
        # A sync call occupies the lane, so queued items are handled here.
        if not self.tasks and threading.current_thread() is self.thread:
            self._handle_queued()
        return self._order.is_pausing

    def wait_at_pause(self, work: Work, goes_on: Callable[[], bool]) -> None:
        """Block a sync call at a pause point until `goes_on()` holds.

        Code that changes the condition calls `wake_lane`.
        """
        self._count_paused(work, 1)
        try:
            self._wait_amid_call(goes_on, may_begin=True)
        finally:
            self._count_paused(work, -1)

    async def async_wait_at_pause(self, work: Work, until: asyncio.Future[None] | None = None) -> None:
        """Wait at an async call's pause point until an item arrives for the lane, or until the given future is done.

        A call rests when all its tasks rest (`Work.active_tasks`).
        """
        assert self.tasks is not None
        with self.paused_block(work):
            await self.tasks.wait_for_rest_end(until)

    @contextlib.contextmanager
    def paused_block(self, work: Work) -> Iterator[None]:
        """Count a task of an async call as resting at a pause point during a block."""
        assert self.tasks is not None
        self._count_paused(work, 1)
        self.tasks.request_look()
        try:
            yield
        finally:
            self._count_paused(work, -1)

    def _count_paused(self, work: Work, by: int) -> None:
        work.paused_tasks += by
        self._order.paused_calls = sum(
            0 < running_work.paused_tasks >= running_work.active_tasks for running_work in self.running.values()
        )

    def stand_still(self, is_over: Callable[[], bool]) -> None:
        """Block the lane during a call until `is_over()` holds. Code that changes the condition calls `wake_lane`."""
        self._order.barrier_calls += 1
        try:
            self._wait_amid_call(is_over, may_begin=False)
        finally:
            self._order.barrier_calls -= 1

    def wake_lane(self) -> None:
        """Wake a waiting lane to check conditions again. May be called from any thread."""
        self.run_action(lambda: None)

    def _wait_amid_call(self, goes_on: Callable[[], bool], may_begin: bool) -> None:
        """Handle the lane's queued items while a call waits for a condition."""
        while not goes_on():
            self._report_idle(runs := len(self.running))
            if not may_begin or (other := self._order.pop_next_barrier(runs)) is None:
                self._handle_item(self._queue.get())
            elif self._order.begin_call(other, runs):
                self._run_work(other)

    # -- async methods

    def reserve_places(self, count: int) -> None:
        """Size the event loop's thread pool for this number of concurrent calls or rows."""
        if count > self._places:
            self._places = count
            if self.tasks is not None:
                self.tasks.ensure_threads(count)

    def ensure_loop(self) -> None:
        """Ensure that the thread has a current event loop for role code, if asyncio has been imported."""
        if "asyncio" in sys.modules:
            self._get_tasks()

    def _get_tasks(self) -> Tasks:
        if self.tasks is None:
            from colocate.worker.serving.tasks import Tasks

            self.tasks = Tasks(self._has_news, self._places)
        self.tasks.ensure_current_loop()
        return self.tasks

    def _start_async(self, work: Work) -> None:
        coroutine = work.run(work)
        # No coroutine means that the call failed before the first await.
        if coroutine is None or isinstance(coroutine, bool):
            del self.running[work.seq]
            if not coroutine:
                self._order.on_failed(work)
            return
        self._get_tasks().start_task(work.seq, self._await_work(work, coroutine))

    def _abandon(self, first: int, last: int) -> None:
        # A sync call at a pause point checks the cancellation mark itself.
        for seq, work in list(self.running.items()):
            if first <= seq <= last and self.tasks is not None and work.concurrency:
                work.is_abandoned = True
                self.tasks.cancel_task(seq)

    async def _await_work(self, work: Work, coroutine: Coroutine[Any, Any, bool]) -> None:
        try:
            if not await coroutine:
                self._order.on_failed(work)
        finally:
            del self.running[work.seq]
