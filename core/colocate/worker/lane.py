"""The lane: the one thread on which a worker runs role code, in the order that `lane_order` tells.

A call that nobody waits for any more is told so, if it looks; of an async method, what it awaits is cancelled.
"""

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
    """One call for the lane. `run` says whether it went well; for an async method it returns a coroutine of that.

    None says that it hasn't begun, though it had: it takes its place again.
    """

    stands: ClassVar[bool] = False

    # Made for each call: given by position, and what begins as nothing isn't given at all.
    run: Callable[[Work], bool | Coroutine[Any, Any, bool] | None]
    label: str
    message: Message | None = None
    body: Any = None
    concurrency: int = 0  # 0: a sync method, which waits for everything before it and is waited for
    spec: Any = None  # of its method; none for what constructs roles
    rows: int | None = attrs.field(default=None, init=False)
    role: Any = attrs.field(default=None, init=False)  # the role's instance, as its worker has it
    on_drop: Callable[[], None] | None = attrs.field(default=None, init=False)
    given_up: bool = attrs.field(default=False, init=False)  # its await was cancelled here, for want of who waits
    allocated: int | None = attrs.field(default=None, init=False)  # see `Device.begin`
    bundles_seen: int = attrs.field(default=0, init=False)  # how many bundles of definitions came before it
    began: float = attrs.field(default=0.0, init=False)  # when, in seconds of time.time()
    taken: Sequence[Taken] | None = attrs.field(default=None, init=False)  # what it has got of residents so far
    used: Sequence[int] = attrs.field(default=(), init=False)  # the residents that it was given
    watches: Mapping[str, Watch] = attrs.field(factory=dict, init=False)  # its arguments, where writes are noticed
    raised: BaseException | None = attrs.field(default=None, init=False)  # by a handler while an async method awaited
    active_tasks: int = attrs.field(default=1, init=False)  # how many things go on in it: itself, and its rows
    kept: int = attrs.field(default=0, init=False)  # how many of them are at a pause point

    @property
    def is_whole(self) -> bool:
        """Whether it ends at once, so that features are told of its end; else they are told of that of its parts."""
        return True

    @property
    def may_wait(self) -> bool:
        """Whether role code goes on in it, or is waited for by it."""
        return True

    def awaiting(self, frames: Sequence[FrameType]) -> Sequence[tuple[str, Sequence[FrameType]]]:
        """Return where it waits, by what that is called, with the frames; `frames` are those of its own task."""
        return [(self.label, frames)]

    def interrupt(self, tasks: Tasks, error: Callable[[], BaseException], row: RowState | None) -> None:
        """Fail of an error, as what it awaits is cancelled. Args: row: Of its parts only this one, where it has any."""
        self.raised = error()
        tasks.cancel(self.seq)

    def drop(self) -> None:
        """Hear that it will never begin: it counts among the calls of its method all the same, as on other ranks."""
        if self.role is not None and isinstance(self.message, Call):
            self.role.ctx.count(self, self.message.method)
        if self.on_drop is not None:
            self.on_drop()

    def forget(self) -> None:
        """Let go of what is a user's, as it is over: its role remembers its last call, and so do tasks begun in it."""
        self.watches, self.raised, self.role = {}, None, None


class BarrierWork(Work):
    """What a lane does about a call of another lane: it stands still."""

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
    """Runs work in order on one thread; `hold` and `resume` come from the thread that receives messages."""

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
        """Start the thread, if it is to have one of its own: else it is the main thread, which calls `run`.

        Args:
            name: Name of its own thread.
            scope: Which drivers' calls count, and whether the worker ends.
            on_held: Called on the lane with (hold, highest call begun) once this rank is back.
            on_broken: Called on the lane when it ends by an exception, which no role can cause but a mistake here.
            turns: How the lane receives messages itself while it idles; None where others always bring them.
            own_thread: Whether it has one, for whose end, and that of threads which role code starts, the process
                doesn't wait.
            on_end: Called on the lane when it has run its last call.
        """
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._on_end = on_end
        self._on_held = on_held
        self._on_broken = on_broken
        self._scope = scope
        self._turns = turns
        self._order = LaneOrder(scope)
        self.running = self._order.running
        self.tasks: Tasks | None = None  # of async methods, once there was one
        self._places = 0
        self._over = threading.Event()
        self.thread = threading.main_thread()
        if own_thread:
            self.thread = Thread(target=self.run, name=name)
            self.thread.start()

    @property
    def last_hold(self) -> int:
        """The last hold in which it was back."""
        return self._order.reported

    def last(self) -> Work | None:
        """The last of the calls that run; from any thread."""
        running = dict(self.running)
        return running[max(running)] if running else None

    def started(self) -> list[Work]:
        """The calls that run; from any thread."""
        return [work for work in dict(self.running).values() if work.began]

    @property
    def waiting(self) -> int:
        """How many calls haven't begun, nearly: holds on their way count, too; from any thread."""
        return self._order.waiting + self._queue.qsize()

    # -- from the receiving thread

    def hold(self, number: int, failed: int) -> None:
        """Take up no work from the failed call on; nobody waits for that one any more.

        Roles (call 0) are constructed nevertheless, so that every rank on which that fails says so.
        """
        item = self._order.hold(number, failed)
        self.give_up(failed, failed)
        self.put(item)

    @property
    def resumed(self) -> int:
        """The last hold that is over: the same on all ranks for a call that all of them begin."""
        return self._order.resumed

    def hold_up(self, token: int, seq: int) -> bool:
        """Don't begin a call before it is decided whether it is withdrawn; False when it has been begun already."""
        return self._order.hold_up(token, seq)

    def decide(self, token: int, dropped: int | None) -> None:
        """Go on after `hold_up`, without the call that is dropped, if it is."""
        self.put(lane_order.Decided(token, dropped))

    def cancel(self, first: int, last: int) -> None:
        """Tell running calls of these numbers that they had better end, if they look; their results still count."""
        rest = False
        for seq, work in list(self.running.items()):
            work.cancelled, rest = work.cancelled or first <= seq <= last, rest or work.kept > 0
        if rest:
            self.look_around()

    def give_up(self, first: int, last: int) -> None:
        """Nobody waits for calls of these numbers any more: those that run end as soon as they can."""
        self.cancel(first, last)
        self.put(_GivenUp(first, last))

    def stop(self) -> None:
        """Begin nothing any more for this driver, which is about to close; what runs has a while to end."""
        self._order.stop()
        self.cancel(0, _NEVER)

    def do(self, action: Callable[[], object]) -> None:
        """Do something on the lane that is no call, also during a hold: it must not raise."""
        self.put(_Action(action))

    def resume(self, number: int, withdrawn: frozenset[int]) -> None:
        """Go on after a hold, without the withdrawn calls."""
        self.put(lane_order.Resume(number, withdrawn))

    def pause(self, number: int) -> int:
        """Begin no further call, and return the last one that was begun; `pause_after` or `go_on` follows."""
        return self._order.pause(number)

    def pause_after(self, number: int, last: int, keeps: bool, on_rest: Callable[[], object]) -> None:
        """Begin no call after the last that any rank has begun, until `go_on`.

        Args:
            number: The pause's.
            last: That of the call.
            keeps: Whether calls that run may stop at their pause points.
            on_rest: Called on the lane once nothing goes on here.
        """
        self.put(lane_order.Pause(number, last, keeps, on_rest))

    def go_on(self, number: int) -> None:
        """Go on after a pause."""
        self.put(lane_order.GoOn(number))

    def renew(self) -> None:
        """Drop what a driver has left behind; the next one's calls and holds have numbers above the base."""
        base = self._scope.base
        self.give_up(0, base)
        self.put(lane_order.Renewed(base))

    def take_unfinished(self) -> list[tuple[int, str]]:
        """Return number and label of the calls that drivers have left unfinished here, once. On the lane."""
        calls, self._order.unfinished = self._order.unfinished, []
        return [(call.seq, call.label) for call in calls if call.seq]

    def turn_to(self, lane: SocketLane) -> None:
        """Messages come by another lane from now on."""
        self.put(_Turned(lane))

    def interrupt(self, error: BaseException) -> bool:
        """The last of the async calls that run fails of an error, as what it awaits is cancelled; False if none does.

        On the lane, while it runs no step of theirs.
        """
        work = self.last()
        if work is None or self.tasks is None:
            return False
        work.raised = error
        self.tasks.cancel(work.seq)
        return True

    def ends_soon(self) -> None:
        """Hear that a call of a method that isn't async is about to say its end. On the lane."""
        if self._turns is not None and not (self._order.waiting or self.tasks):  # else what runs next is here already
            self._turns.soon()

    def waits(self) -> None:
        """Hear that something is about to wait here, perhaps after `ends_soon`: the other thread receives meanwhile."""
        if self._turns is not None and threading.current_thread() is self.thread:
            self._turns.over()

    def join(self) -> None:
        """Wait until it has ended."""
        self._over.wait()
        if self.thread is not threading.main_thread():
            self.thread.join()

    def close(self) -> None:
        """End the lane after what runs now, now that its scope is closed; queued work is dropped.

        What runs has its grace, in which its results still count: async methods go on awaiting, too.
        """
        self.cancel(0, _NEVER)
        self.put(None)

    def look_again(self) -> None:
        """Something has come: have the lane see that, if it doesn't wait for its queue alone."""
        if self._turns is not None:
            self._turns.wake()
        if self.tasks is not None:
            self.tasks.wake()

    def put(self, item: _Item) -> None:
        """Queue work, or something else that the lane is to do."""
        self._queue.put(item)
        self.look_again()

    # -- on the lane

    def run(self) -> None:
        """Be the lane until it is closed."""
        try:
            while (work := self._next()) is not None:
                if self._order.begins(work, len(self.tasks or ())):
                    if work.concurrency:
                        self._start(work)
                    else:
                        self._run(work)
                del work  # with its arguments, of which some are large
        except BaseException as error:
            self._on_broken(error)
        finally:
            if self._turns is not None:
                self._turns.over()
            self._on_end()  # first: roles may end what they have left in the loop
            if self.tasks is not None:
                self.tasks.close()
            self._over.set()

    def _next(self) -> Work | None:
        """The next call to begin, or None to end."""
        while True:
            if self._is_plain():  # as nearly always: the next item in the queue is what to do
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
        """Tell what is to be told of a lane on which so many calls run, and nothing can begin."""
        if (back := self._order.back(runs)) is not None:
            self._on_held(*back)
        if (pause := self._order.rests(runs)) is not None:
            pause.on_rest()

    def _is_plain(self) -> bool:
        """Whether nothing runs, waits or is held, and something has come."""
        if self._loop_goes_on() or self._scope.closed is not None or not self._order.is_plain:
            return False
        return self._turns is None or self._turns.wait(self._has_news)

    def _take(self) -> None:
        """Wait for something to happen and take note of it."""
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
        """Whether calls await something, or role code has left something in the loop."""
        if self.tasks is None:
            if "asyncio" not in sys.modules:
                return False
            return self._with_loop().go_on()  # what role code had as its current loop, before there was a call
        return len(self.tasks) > 0 or self.tasks.go_on()

    def _has_news(self) -> bool:
        return not self._queue.empty()

    def _note_all(self) -> None:
        while self._has_news():  # nobody else takes from it
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
            went = work.run(work)
            if went is None:
                self._order.put_back(work)
            elif not went:
                self._order.failed(work)
        finally:
            del self.running[work.seq]

    # -- pause points

    def keeps(self) -> bool:
        """Whether the call that runs is to stop at its next pause point."""
        if not self.tasks and threading.current_thread() is self.thread:  # else the lane takes note by itself
            self._note_all()
        return self._order.keeps

    def rest_here(self, work: Work, goes_on: Callable[[], bool]) -> None:
        """Wait amid a call that isn't async, at one of its pause points; who changes something has it `look_around`."""
        self._rests(work, 1)
        try:
            self._wait(goes_on, may_begin=True)
        finally:
            self._rests(work, -1)

    async def rest(self, work: Work, until: asyncio.Future[None] | None = None) -> None:
        """Wait at a pause point of an async call, until the lane has heard something, or until what is given is done.

        A call rests when all that goes on in it does (`Work.active_tasks`).
        """
        assert self.tasks is not None
        with self.resting(work):
            await self.tasks.rest(until)

    @contextlib.contextmanager
    def resting(self, work: Work) -> Iterator[None]:
        """A block in which something of an async call only waits."""
        assert self.tasks is not None
        self._rests(work, 1)
        self.tasks.look()
        try:
            yield
        finally:
            self._rests(work, -1)

    def _rests(self, work: Work, by: int) -> None:
        work.kept += by
        self._order.resting = sum(0 < each.kept >= each.active_tasks for each in self.running.values())

    def stand(self, is_over: Callable[[], bool]) -> None:
        """Stand still amid a call until something is over; who ends that has the lane `look_around`."""
        self._order.standing += 1
        try:
            self._wait(is_over, may_begin=False)
        finally:
            self._order.standing -= 1

    def look_around(self) -> None:
        """Something may be over; from any thread."""
        self.do(lambda: None)

    def _wait(self, goes_on: Callable[[], bool], may_begin: bool) -> None:
        """Do amid a call what a lane does that waits, so that nothing waits for it."""
        while not goes_on():
            self._tell(runs := len(self.running))
            if not may_begin or (other := self._order.next_stand(runs)) is None:
                self._note(self._queue.get())
            elif self._order.begins(other, runs):
                self._run(other)

    # -- async methods

    def have_places(self, count: int) -> None:
        """So many calls, or rows, of one async method run at once here, at most."""
        if count > self._places:
            self._places = count
            if self.tasks is not None:
                self.tasks.have_threads(count)

    def have_loop(self) -> None:
        """See that role code that is about to run has a current event loop; without asyncio nobody asks for one."""
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
        if coroutine is None or isinstance(coroutine, bool):  # it failed before there was anything to await
            del self.running[work.seq]
            if not coroutine:
                self._order.failed(work)
            return
        self._with_loop().begin(work.seq, self._await(work, coroutine))

    def _give_up(self, first: int, last: int) -> None:
        for seq, work in list(self.running.items()):  # one that isn't async is at a pause point, and looks by itself
            if first <= seq <= last and self.tasks is not None and work.concurrency:
                work.given_up = True
                self.tasks.cancel(seq)

    async def _await(self, work: Work, coroutine: Coroutine[Any, Any, bool]) -> None:
        try:
            if not await coroutine:
                self._order.failed(work)
        finally:
            del self.running[work.seq]
