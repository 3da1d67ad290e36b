"""The lane: the one thread on which a worker runs role code, in the order of `lane_order`."""

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
from colocate._protocol.taken import Taken
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
    """One call for the lane. `run` returns whether the call went well; for an async method, a coroutine that does.

    None puts the call back: the lane takes it up again later.
    """

    stands: ClassVar[bool] = False

    # Instances are made for each call, so fields are passed by position, and fields with an initial value not at all.
    run: Callable[[Work], bool | Coroutine[Any, Any, bool] | None]
    label: str
    message: Message | None = None
    body: Any = None
    concurrency: int = 0  # 0 for a sync method, which is a barrier among the calls
    spec: Any = None  # the method's spec; none for the construction of roles
    rows: int | None = attrs.field(default=None, init=False)
    role: Any = attrs.field(default=None, init=False)  # the worker's instance of the role
    on_drop: Callable[[], None] | None = attrs.field(default=None, init=False)
    # Whether the await was cancelled here because nobody waits for the call.
    given_up: bool = attrs.field(default=False, init=False)
    allocated: int | None = attrs.field(default=None, init=False)  # see `Device.begin`
    bundles_seen: int = attrs.field(default=0, init=False)  # number of bundles of definitions that came before
    began: float = attrs.field(default=0.0, init=False)  # start, in seconds of time.time()
    taken: Sequence[Taken] | None = attrs.field(default=None, init=False)  # parts of residents read so far
    used: Sequence[int] = attrs.field(default=(), init=False)  # keys of the residents among the arguments
    watches: Mapping[str, Watch] = attrs.field(factory=dict, init=False)  # arguments under a check for writes
    # Error of a signal handler during an async method's await.
    raised: BaseException | None = attrs.field(default=None, init=False)
    # Number of running tasks in the call: the call itself and rows.
    active_tasks: int = attrs.field(default=1, init=False)
    kept: int = attrs.field(default=0, init=False)  # number of those tasks that rest at a pause point

    @property
    def is_whole(self) -> bool:
        """Whether features are told of the call's end as one; otherwise they are told of each row's end."""
        return True

    @property
    def may_wait(self) -> bool:
        """Whether role code goes on during the call, or is waited for."""
        return True

    def awaiting(self, frames: Sequence[FrameType]) -> Sequence[tuple[str, Sequence[FrameType]]]:
        """Return the call's waiting places: names with frames; `frames` are those of the call's own task."""
        return [(self.label, frames)]

    def interrupt(self, tasks: Tasks, error: Callable[[], BaseException], row: RowState | None) -> None:
        """Fail the call with an error, and cancel the await. Args: row: Only this row, if the call has rows."""
        self.raised = error()
        tasks.cancel(self.seq)

    def drop(self) -> None:
        """Finish a call that never begins. It counts among the calls of the method, as on other ranks."""
        if self.role is not None and isinstance(self.message, Call):
            self.role.ctx.count(self, self.message.method)
        if self.on_drop is not None:
            self.on_drop()

    def forget(self) -> None:
        """Drop references to a user's objects after the end: the role and started tasks refer to the last call."""
        self.watches, self.raised, self.role = {}, None, None


class BarrierWork(Work):
    """Stand-in for a call of another lane, during which this lane stands still."""

    stands = True


@attrs.frozen
class _GivenUp:
    first: int
    last: int


@attrs.frozen
class _Turned:
    lane: SocketLane


@attrs.frozen
class _Action:
    act: Callable[[], object]


_Item: TypeAlias = "tuple[Message, Any] | Work | lane_order.Item | _GivenUp | _Turned | _Action | None"
_NEVER = sys.maxsize


class Lane:
    """Runs work in order on one thread; `hold` and `resume` come from the receiving thread."""

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
        """Start the thread, if the lane has one; otherwise the main thread calls `run`.

        Args:
            name: Name of the lane's own thread.
            scope: Which drivers' calls count, and whether the worker ends.
            on_held: Called on the lane with (hold, highest call begun) once this rank is back.
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
        self.tasks: Tasks | None = None  # made for the first async call
        self._places = 0
        self._over = threading.Event()
        self.thread = threading.main_thread()
        if own_thread:
            self.thread = Thread(target=self.run, name=name)
            self.thread.start()

    @property
    def last_hold(self) -> int:
        """Number of the last hold in which the lane was back."""
        return self._order.reported

    def last(self) -> Work | None:
        """Return the last running call, or None; from any thread."""
        running = dict(self.running)
        return running[max(running)] if running else None

    def started(self) -> list[Work]:
        """Return the running calls; from any thread."""
        return [work for work in dict(self.running).values() if work.began]

    @property
    def waiting(self) -> int:
        """Approximate number of queued calls (holds on their way included); from any thread."""
        return self._order.waiting + self._queue.qsize()

    # -- from the receiving thread

    def hold(self, number: int, failed: int) -> None:
        """Begin no call from the failed one on, and give up the failed call.

        Roles (call 0) are constructed nevertheless, so that every rank with a failing constructor reports the failure.
        """
        item = self._order.hold(number, failed)
        self.give_up(failed, failed)
        self.put(item)

    @property
    def resumed(self) -> int:
        """Number of the last finished hold: equal on all ranks for a call that all ranks begin."""
        return self._order.resumed

    def hold_up(self, token: int, seq: int) -> bool:
        """Hold up a call until a decision about the withdrawal; False if the call has begun already."""
        return self._order.hold_up(token, seq)

    def decide(self, token: int, dropped: int | None) -> None:
        """Go on after `hold_up`, without the dropped call, if any."""
        self.put(lane_order.Decided(token, dropped))

    def cancel(self, first: int, last: int) -> None:
        """Mark running calls of these numbers as cancelled, for role code to check; their results still count."""
        rest = False
        for seq, work in list(self.running.items()):
            work.cancelled, rest = work.cancelled or first <= seq <= last, rest or work.kept > 0
        if rest:
            self.look_around()

    def give_up(self, first: int, last: int) -> None:
        """Cancel calls of these numbers for which nobody waits any more; running ones end as soon as possible."""
        self.cancel(first, last)
        self.put(_GivenUp(first, last))

    def stop(self) -> None:
        """Begin no call any more for a driver that will close; running calls have a grace period."""
        self._order.stop()
        self.cancel(0, _NEVER)

    def do(self, action: Callable[[], object]) -> None:
        """Run an action on the lane that isn't a call, also during a hold. Must not raise."""
        self.put(_Action(action))

    def resume(self, number: int, withdrawn: frozenset[int]) -> None:
        """Go on after a hold, without the withdrawn calls."""
        self.put(lane_order.Resume(number, withdrawn))

    def pause(self, number: int) -> int:
        """Begin no further call, and return the number of the last begun one; `pause_after` or `go_on` follows."""
        return self._order.pause(number)

    def pause_after(self, number: int, last: int, keeps: bool, on_rest: Callable[[], object]) -> None:
        """Begin no call after the last one begun by any rank, until `go_on`.

        Args:
            number: Number of the pause.
            last: Number of the last call to begin.
            keeps: Whether running calls may stop at their pause points.
            on_rest: Called on the lane once nothing runs here.
        """
        self.put(lane_order.Pause(number, last, keeps, on_rest))

    def go_on(self, number: int) -> None:
        """Go on after a pause."""
        self.put(lane_order.GoOn(number))

    def renew(self) -> None:
        """Drop a former driver's calls; numbers of the next driver's calls and holds are above the base."""
        base = self._scope.base
        self.give_up(0, base)
        self.put(lane_order.Renewed(base))

    def take_unfinished(self) -> list[tuple[int, str]]:
        """Return number and label of calls that former drivers left unfinished, once. On the lane."""
        calls, self._order.unfinished = self._order.unfinished, []
        return [(call.seq, call.label) for call in calls if call.seq]

    def turn_to(self, lane: SocketLane) -> None:
        """Receive messages from another lane of the driver from now on."""
        self.put(_Turned(lane))

    def interrupt(self, error: BaseException) -> bool:
        """Fail the last running async call with an error, and cancel the await; False when none runs.

        On the lane, between steps of async calls.
        """
        work = self.last()
        if work is None or self.tasks is None:
            return False
        work.raised = error
        self.tasks.cancel(work.seq)
        return True

    def ends_soon(self) -> None:
        """Prepare to receive messages on the lane: a sync call is about to report the end. On the lane."""
        # Otherwise the next call is here already.
        if self._turns is not None and not (self._order.waiting or self.tasks):
            self._turns.soon()

    def waits(self) -> None:
        """Return the receiving to the other thread: the lane is about to wait, perhaps after `ends_soon`."""
        if self._turns is not None and threading.current_thread() is self.thread:
            self._turns.over()

    def join(self) -> None:
        """Wait until the lane has ended."""
        self._over.wait()
        if self.thread is not threading.main_thread():
            self.thread.join()

    def close(self) -> None:
        """End the lane after the running calls, now that the scope is closed; queued work is dropped.

        Running calls have a grace period, in which their results still count: async methods go on awaiting, too.
        """
        self.cancel(0, _NEVER)
        self.put(None)

    def look_again(self) -> None:
        """Wake the lane for a new item, if the lane waits for more than the queue."""
        if self._turns is not None:
            self._turns.wake()
        if self.tasks is not None:
            self.tasks.wake()

    def put(self, item: _Item) -> None:
        """Queue work, or another item for the lane."""
        self._queue.put(item)
        self.look_again()

    # -- on the lane

    def run(self) -> None:
        """Run the lane until `close`."""
        try:
            while (work := self._next()) is not None:
                if self._order.begins(work, len(self.tasks or ())):
                    if work.concurrency:
                        self._start(work)
                    else:
                        self._run(work)
                del work  # frees the arguments, which may be large
        except BaseException as error:
            self._on_broken(error)
        finally:
            if self._turns is not None:
                self._turns.over()
            self._on_end()  # first: roles may end work in the loop
            if self.tasks is not None:
                self.tasks.close()
            self._over.set()

    def _next(self) -> Work | None:
        while True:
            if self._is_plain():  # nearly always: the next item in the queue is the next call
                item = self._queue.get()
                if isinstance(item, Work):
                    return item
                self._note(item)
            if self._scope.closed is not None and not self.tasks:
                return None
            if (work := self._order.next(len(self.tasks or ()))) is not None:
                return work
            self._tell(len(self.tasks or ()))
            self._take()

    def _tell(self, runs: int) -> None:
        """Report a hold or pause that this lane has reached, with this number of running calls."""
        if (back := self._order.back(runs)) is not None:
            self._on_held(*back)
        if (pause := self._order.rests(runs)) is not None:
            pause.on_rest()

    def _is_plain(self) -> bool:
        """Return whether nothing runs, waits or is held, and an item has arrived."""
        if self._loop_goes_on() or self._scope.closed is not None or not self._order.is_plain:
            return False
        return self._turns is None or self._turns.wait(self._has_news)

    def _take(self) -> None:
        if self._loop_goes_on():
            assert self.tasks is not None
            if self._turns is not None:
                self._turns.over()
            self.tasks.wait()
            self._note_all()
            return
        if self._turns is not None:
            self._turns.wait(self._has_news)
        self._note(self._queue.get())
        self._note_all()

    def _loop_goes_on(self) -> bool:
        """Return whether calls await something, or role code has left work in the loop."""
        if self.tasks is None:
            if "asyncio" not in sys.modules:
                return False
            return self._with_loop().go_on()  # role code may have used a current loop before the first async call
        return len(self.tasks) > 0 or self.tasks.go_on()

    def _has_news(self) -> bool:
        return not self._queue.empty()

    def _note_all(self) -> None:
        while self._has_news():  # no other thread takes from the queue
            self._note(self._queue.get())

    def _note(self, item: _Item) -> None:
        if isinstance(item, _GivenUp):
            self._give_up(item.first, item.last)
        elif isinstance(item, _Action):
            item.act()
        elif isinstance(item, _Turned):
            if self._turns is not None:
                self._turns.turn_to(item.lane)
        elif item is not None and not isinstance(item, tuple):
            self._order.note(item)
        if self.tasks:
            self.tasks.end_rests()

    def _run(self, work: Work) -> None:
        try:
            is_done = work.run(work)
            if is_done is None:
                self._order.put_back(work)
            elif not is_done:
                self._order.failed(work)
        finally:
            del self.running[work.seq]

    # -- pause points

    def keeps(self) -> bool:
        """Return whether the running call should stop at the next pause point."""
        if not self.tasks and threading.current_thread() is self.thread:  # otherwise the lane handles items by itself
            self._note_all()
        return self._order.keeps

    def rest_here(self, work: Work, goes_on: Callable[[], bool]) -> None:
        """Block a sync call at a pause point; code that changes the condition calls `look_around`."""
        self._rests(work, 1)
        try:
            self._wait(goes_on, may_begin=True)
        finally:
            self._rests(work, -1)

    async def rest(self, work: Work, until: asyncio.Future[None] | None = None) -> None:
        """Wait at a pause point of an async call for any news of the lane, or for a given future.

        A call rests when all tasks in it do (`Work.active_tasks`).
        """
        assert self.tasks is not None
        with self.resting(work):
            await self.tasks.rest(until)

    @contextlib.contextmanager
    def resting(self, work: Work) -> Iterator[None]:
        """Return a block in which a task of an async call only waits."""
        assert self.tasks is not None
        self._rests(work, 1)
        self.tasks.look()
        try:
            yield
        finally:
            self._rests(work, -1)

    def _rests(self, work: Work, by: int) -> None:
        work.kept += by
        self._order.resting = sum(
            0 < running_work.kept >= running_work.active_tasks for running_work in self.running.values()
        )

    def stand(self, is_over: Callable[[], bool]) -> None:
        """Stand still during a call until a condition holds; code that ends the wait calls `look_around`."""
        self._order.standing += 1
        try:
            self._wait(is_over, may_begin=False)
        finally:
            self._order.standing -= 1

    def look_around(self) -> None:
        """Wake a waiting lane for new checks; from any thread."""
        self.do(lambda: None)

    def _wait(self, goes_on: Callable[[], bool], may_begin: bool) -> None:
        """Handle the lane's items during a call, so that nothing waits for this lane."""
        while not goes_on():
            self._tell(runs := len(self.running))
            if not may_begin or (other := self._order.next_stand(runs)) is None:
                self._note(self._queue.get())
            elif self._order.begins(other, runs):
                self._run(other)

    # -- async methods

    def have_places(self, count: int) -> None:
        """Size the loop's executor for the concurrent calls, or rows, of one async method."""
        if count > self._places:
            self._places = count
            if self.tasks is not None:
                self.tasks.have_threads(count)

    def have_loop(self) -> None:
        """Ensure a current event loop for role code; without asyncio, no code asks for one."""
        if "asyncio" in sys.modules:
            self._with_loop()

    def _with_loop(self) -> Tasks:
        if self.tasks is None:
            from colocate.worker.serving.tasks import Tasks

            self.tasks = Tasks(self._has_news, self._places)
        self.tasks.have_current()
        return self.tasks

    def _start(self, work: Work) -> None:
        coroutine = work.run(work)
        if coroutine is None or isinstance(coroutine, bool):  # the call failed before the first await
            del self.running[work.seq]
            if not coroutine:
                self._order.failed(work)
            return
        self._with_loop().begin(work.seq, self._await(work, coroutine))

    def _give_up(self, first: int, last: int) -> None:
        for seq, work in list(self.running.items()):  # a sync call at a pause point checks the mark by itself
            if first <= seq <= last and self.tasks is not None and work.concurrency:
                work.given_up = True
                self.tasks.cancel(seq)

    async def _await(self, work: Work, coroutine: Coroutine[Any, Any, bool]) -> None:
        try:
            if not await coroutine:
                self._order.failed(work)
        finally:
            del self.running[work.seq]
