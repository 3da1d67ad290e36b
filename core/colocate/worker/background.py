"""Gives each background role a separate lane in a worker.

Calls on the whole worker wait until all lanes stand still.
"""

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
    """A background role's lane, with separate device state and torch settings, and on a GPU a separate stream.

    Torch's process-wide settings belong to the roles of the main lane.
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
        """Start the lane's thread.

        Args: role: The role's name. boot, scope: Those of the worker. on_held, on_broken: See `Lane`.
        """
        self.device = Device(boot.device, in_process=True)
        self.setting = Setting(boot.device, in_process=True, leaves=self.device.on_stream_left, own_stream=True)
        self.lane = Lane(
            f"colocate-lane-{boot.worker}/{role}",
            scope,
            on_held,
            on_broken,
            on_end=lambda: self.runner.close(),
        )

    def is_pausing(self) -> bool:
        """Return whether the running call should stop at the next pause point."""
        return self.lane.is_pausing()

    def pause_point(self, call: CallState) -> None:
        """Stop a sync call while the lane is paused, unless nobody waits for the call any more.

        Raises:
            ColocateError: The calling code is async, or on another thread.
        """
        if not self.lane.is_pausing():
            return
        if (work := self._to_work(call)).concurrency or threading.current_thread() is not self.lane.thread:
            raise ColocateError(
                f"ctx.pause_point() stops the thread on which {work.label} runs: an async method awaits "
                "ctx.async_pause_point(), and other threads have none"
            )
        self.wait_at_pause(work, lambda: True, lambda: work.cancelled)

    def wait_at_pause(self, work: Work, may_go_on: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Block a sync call until `may_go_on()` holds and the lane isn't paused, or until `is_over()` holds."""
        if (may_go_on() and not self.lane.is_pausing()) or is_over():
            return
        self.device.finish_call(work.label)  # The call's device work must be done before another lane uses the device.
        self.lane.wait_at_pause(work, lambda: (may_go_on() and not self.lane.is_pausing()) or is_over())

    async def async_pause_point(self, call: CallState) -> None:
        """Wait at a pause point of an async call while the lane is paused.

        Concurrent calls continue to their pause points.
        """
        work = self._to_work(call)
        while self.lane.is_pausing() and not work.cancelled:
            self.device.finish_call(work.label)
            await self.lane.async_wait_at_pause(work)

    @contextlib.asynccontextmanager
    async def resting(self, call: CallState) -> AsyncIterator[None]:
        """Count a block of an async call as a pause point. Inside the block, the call may wait, but not compute."""
        work = self._to_work(call)
        self.device.finish_call(work.label)
        with self.lane.paused_block(work):
            yield
        await self.async_pause_point(call)

    @staticmethod
    def _to_work(call: CallState) -> Work:
        work = call.call if isinstance(call, RowState) else call
        assert isinstance(work, Work)
        return work


class LaneBarrier:
    """A barrier that stops all background lanes at one place in the call order while the main lane runs a call."""

    def __init__(self, seq: int, label: str, lanes: Sequence[Lane], news: threading.Condition, scope: Scope) -> None:
        """Queue the barrier on all lanes.

        Args:
            seq: The call's number.
            label: The call's label.
            lanes: The background lanes.
            news: Notified of changes of this barrier and the scope.
            scope: Says whether the call may wait.
        """
        self._seq, self._lanes, self._missing, self._is_over = seq, lanes, len(lanes), False
        self._news, self._scope = news, scope
        for lane in lanes:
            lane.enqueue(BarrierWork(seq, partial(self._hold_lane, lane), label))

    def _hold_lane(self, lane: Lane, work: Work) -> bool:
        with self._news:
            self._missing -= 1
            self._news.notify_all()
        lane.stand_still(lambda: self._is_over or self._scope.closed is not None)
        return True

    def wait_for_lanes(self) -> bool:
        """Wait on the main lane until all other lanes stand still.

        Return False if the call must not wait any longer.
        """
        with self._news:
            self._news.wait_for(lambda: not self._missing or self._scope.get_wait_refusal(self._seq) is not None)
            return not self._missing

    def release_lanes(self) -> None:
        """Release the lanes, because the call has ended or won't run."""
        self._is_over = True
        for lane in self._lanes:
            lane.wake_lane()
