"""Background roles: each has a lane of its own in its worker, and what concerns all lanes finds them standing still."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from colocate._role.context import CallState, RowState
from colocate.errors import ColocateError
from colocate.executor import Boot
from colocate.worker.device import Device
from colocate.worker.lane import BarrierWork, Lane, Work
from colocate.worker.serving.scope import Scope
from colocate.worker.settings import Setting

if TYPE_CHECKING:
    from colocate.worker.runner import Runner


class Background:
    """A role's lane, and what it computes with there: on a GPU that is a stream of its own.

    What torch has set for a whole process is left to the roles of the main lane.
    """

    runner: Runner

    def __init__(
        self,
        role: str,
        boot: Boot,
        scope: Scope,
        on_held: Callable[[int, int], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Start its thread. Args: role: Its name. boot, scope: Its worker's. on_held, on_broken: See `Lane`."""
        self.device = Device(boot.device, in_process=True)
        self.setting = Setting(boot.device, in_process=True, leaves=self.device.leaves, own_stream=True)
        self.lane = Lane(
            f"colocate-lane-{boot.worker}/{role}",
            scope,
            on_held,
            on_broken,
            on_end=lambda: self.runner.close(),
        )

    def keeps(self) -> bool:
        """Whether the call that runs is to stop at its next pause point."""
        return self.lane.keeps()

    def pause_point(self, call: CallState) -> None:
        """Stop a call that isn't async while its lane is paused, unless nobody waits for it any more.

        Raises:
            ColocateError: It isn't called where a call can stop.
        """
        if not self.lane.keeps():
            return
        if (work := self._work(call)).concurrency or threading.current_thread() is not self.lane.thread:
            raise ColocateError(
                f"ctx.pause_point() stops the thread on which {work.label} runs: an async method awaits "
                "ctx.async_pause_point(), and other threads have none"
            )
        self.rest(work, lambda: True, lambda: work.cancelled)

    def rest(self, work: Work, may_go_on: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Wait amid a call that isn't async until it may go on, and its lane isn't paused; or until it is over."""
        if (may_go_on() and not self.lane.keeps()) or is_over():
            return
        self.device.end(work.label)  # what it has begun there is done before another lane uses it
        self.lane.rest_here(work, lambda: (may_go_on() and not self.lane.keeps()) or is_over())

    async def async_pause_point(self, call: CallState) -> None:
        """As `pause_point`, of an async call: those beside it go on to their own."""
        work = self._work(call)
        while self.lane.keeps() and not work.cancelled:
            self.device.end(work.label)
            await self.lane.rest(work)

    @contextlib.asynccontextmanager
    async def resting(self, call: CallState) -> AsyncIterator[None]:
        """A block that counts as a pause point of an async call, which only waits in it."""
        work = self._work(call)
        self.device.end(work.label)
        with self.lane.resting(work):
            yield
        await self.async_pause_point(call)

    @staticmethod
    def _work(call: CallState) -> Work:
        found = call.of if isinstance(call, RowState) else call
        assert isinstance(found, Work)
        return found


class LaneBarrier:
    """The background lanes of a worker stand still at one place in their orders, while the main lane does a call."""

    def __init__(self, seq: int, label: str, lanes: Sequence[Lane], news: threading.Condition, scope: Scope) -> None:
        """Have lanes come to it.

        Args:
            seq: The call's number.
            label: What it is.
            lanes: The lanes but the main one.
            news: Told when something changes here, or in the scope.
            scope: Says whether the call may wait.
        """
        self._seq, self._lanes, self._missing, self._is_over = seq, lanes, len(lanes), False
        self._news, self._scope = news, scope
        for lane in lanes:
            lane.put(BarrierWork(seq, partial(self._stand, lane), label))

    def _stand(self, lane: Lane, work: Work) -> bool:
        with self._news:
            self._missing -= 1
            self._news.notify_all()
        lane.stand(lambda: self._is_over or self._scope.closed is not None)
        return True

    def wait(self) -> bool:
        """Wait on the main lane until all others stand; False where the call mustn't wait, or not any longer."""
        with self._news:
            self._news.wait_for(lambda: not self._missing or self._scope.why(self._seq) is not None)
            return not self._missing

    def end(self) -> None:
        """Have them go on: the call is over, or won't be."""
        self._is_over = True
        for lane in self._lanes:
            lane.look_around()
