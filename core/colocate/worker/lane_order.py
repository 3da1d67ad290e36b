"""Chooses the next call of one lane, and applies holds and pauses. It uses no threads, sockets or clocks.

After a failed call, no rank begins that call or a later one until all ranks have reached the barrier. Earlier calls
still run, because other ranks may wait for their results. This rank stops at once when a call fails here, and on a
message from the driver when a call has failed on another rank. Holds are numbered; the lane is held while its highest
known hold hasn't been resumed. `_calls/order.py` has the driver's half.

The lane of a background role can be paused: the ranks agree on the last call to begin, and no later call begins until
the pause ends. The only exceptions are barriers for calls on the whole worker, for which the lane only stands still.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import attrs

from colocate.worker.serving.scope import Scope

if TYPE_CHECKING:
    from colocate.worker.lane import Work

_NEVER = sys.maxsize


@attrs.frozen
class Hold:
    """Queue item that begins a hold. Everything sent before the failed call is queued before this item."""

    number: int


@attrs.frozen
class Resume:
    """Queue item that ends a hold. The lane drops the calls that the driver has withdrawn."""

    hold: int
    withdrawn: frozenset[int]


@attrs.frozen
class Decision:
    """Queue item with the decision whether a held-up call (`LaneOrder.defer_call`) is dropped."""

    token: int
    dropped: int | None


@attrs.frozen
class DriverChange:
    """Queue item that drops the calls of a former driver.

    The next driver's calls and holds have numbers above `base`.
    """

    base: int


@attrs.frozen
class Pause:
    """Queue item that pauses the lane: no call after call `last` begins until an `EndPause` item follows.

    Barriers queued meanwhile move ahead of the held-up calls. With `stops_calls`, running calls may stop at their next
    pause point once call `last` has begun. `on_rest` is called on the lane when no call runs there any more.
    """

    number: int
    last: int
    stops_calls: bool
    on_rest: Callable[[], object]


@attrs.frozen
class EndPause:
    """Queue item that ends this pause and all earlier pauses."""

    number: int


Item: TypeAlias = Hold | Resume | Decision | DriverChange | Pause | EndPause


class LaneOrder:
    """The queued and running calls of one lane, and the holds and pauses that decide which call may begin.

    Methods called by the receiving thread take effect at once. Queued items keep their place among the calls, and take
    effect when the lane applies them (`handle_item`).

    Attributes:
        running: Running calls by number.
        last_resumed: Number of the last finished hold. When a call begins, all ranks have the same number.
        last_reported: Number of the last hold for which this lane has reached the barrier.
        paused_calls: Number of running calls that have stopped at a pause point.
        barrier_calls: Number of running calls that only block this lane while another lane runs a call.
        unfinished: Calls of former drivers that have failed here, or never began.
    """

    def __init__(self, scope: Scope) -> None:
        """Make an empty order. Args: scope: Says which drivers' calls are valid, and whether the worker is closing."""
        self.running: dict[int, Work] = {}
        self.unfinished: list[Work] = []
        self.last_resumed = self.last_reported = self.paused_calls = self.barrier_calls = 0
        self._paused: Pause | None = None
        self._is_rest_reported = False
        # Queue positions of barriers that were moved ahead of a pause's held-up calls.
        self._places: dict[int, float] = {}
        self._scope = scope
        self._waiting: deque[Work] = deque()
        self._last_hold = self._last_noted = 0
        self._limits: dict[int, int] = {}  # Maps each unfinished hold to the first call that may not begin.
        # Maps each undecided withdrawal to the call, and each pause (by its negative number) to the first held-up call.
        # The lane begins neither a call in this table nor any later call.
        self._deferred: dict[int, int] = {}
        self._last_begun = -1
        self._stopped_for = -1  # `Scope.base` of a driver whose calls no longer begin; -1 for none.

    @property
    def waiting_count(self) -> int:
        """Number of queued calls."""
        return len(self._waiting)

    # -- called by the receiving thread

    def hold(self, number: int, failed: int) -> Hold:
        """Begin neither the failed call nor any later call, and return the queue item for the lane.

        Roles are still constructed (call 0), so that every rank with a failing constructor reports the failure.
        """
        self._limit_to(number, max(failed, 1))
        self._last_hold = max(self._last_hold, number)
        return Hold(number)

    def defer_call(self, token: int, seq: int) -> bool:
        """Hold up a call until the driver decides whether to withdraw it. Return whether the call hadn't begun yet."""
        # This entry is set before the check, so that the lane sees the entry if a call begins meanwhile.
        self._deferred[token] = seq
        return seq not in self.running and seq > self._last_begun

    def pause(self, number: int) -> int:
        """Begin no further call, and return the last begun call's number. A `Pause` or `EndPause` item must follow."""
        # This entry is set before running calls are listed, so that no call begins unnoticed in between.
        self._deferred[-number] = 1
        begun = max((seq for seq, call in list(self.running.items()) if not call.is_barrier), default=0)
        return max(begun, self._last_begun)

    def stop_beginning(self) -> None:
        """Begin no more calls for the present driver, which is about to close."""
        # This mark is set before running calls are checked, so that no call begins unnoticed in between.
        self._stopped_for = self._scope.base

    # -- on the lane

    @property
    def is_clear(self) -> bool:
        """Whether the next arriving call begins at once, because nothing waits or is held. This is the usual case."""
        return not (self._waiting or self._is_limited or self.last_reported < self._last_hold)

    def pop_next(self, overlapping: int) -> Work | None:
        """Pop the next queued call if a call may begin while `overlapping` async calls run; otherwise return None."""
        if self._waiting and self._scope.closed is None and self._can_begin(self._waiting[0], overlapping):
            return self._waiting.popleft()
        return None

    def pop_next_barrier(self, overlapping: int) -> Work | None:
        """Pop the next queued call if it is a barrier. Called while a sync call runs.

        Only a barrier, for which the lane stands still, may begin then.
        """
        return self.pop_next(overlapping) if self._waiting and self._waiting[0].is_barrier else None

    def begin_call(self, call: Work, overlapping: int) -> bool:
        """Record a popped call as running, and return False if the call may not begin after all.

        A hold, the worker's end or a new driver may have come since the call was popped.
        """
        self.running[call.seq] = call
        # The call's driver has released the worker. A queued `DriverChange` item follows.
        if self._scope.is_of_former_driver(call.seq):
            del self.running[call.seq]
            self.unfinished.append(call)
            call.drop_call()
            return False
        if self._scope.closed is None and self._can_begin(call, overlapping):
            if call.is_barrier:
                self._places.pop(call.seq, None)
            else:
                self._last_begun = call.seq
            return True
        del self.running[call.seq]
        self.put_back(call)
        return False

    def put_back(self, call: Work) -> None:
        """Put a call back at the head of the queue."""
        self._waiting.appendleft(call)

    def on_failed(self, call: Work) -> None:
        """Record a failed call, and begin neither this call nor later calls until the hold is resumed."""
        if self._scope.is_of_former_driver(call.seq):  # No driver is left to lead a hold.
            self.unfinished.append(call)
            return
        # This failure starts the next hold, unless a hold is already under way.
        self._last_noted = self._last_hold = max(self._last_hold, self.last_resumed + 1)
        self._limit_to(self._last_hold, call.seq)

    def take_hold_report(self, overlapping: int) -> tuple[int, int] | None:
        """Return (hold, last begun call) when this rank reaches a hold's barrier; otherwise return None.

        A rank has reached the barrier when nothing runs, and no call before the failed call waits. Calls held up by a
        pause don't count. Each hold is returned only once.
        """
        if (
            overlapping > self._idle_count
            or self.last_reported >= self._last_hold
            or self._last_noted < self._last_hold
        ):
            return None
        first = self._waiting[0] if self._waiting else None
        if first is not None and self._get_place(first) < self._limit_of_holds and not self._is_paused(first):
            return None
        self.last_reported = self._last_hold
        return self._last_hold, self._last_begun

    @property
    def is_pausing(self) -> bool:
        """Whether running calls should stop at their pause points."""
        return self._paused is not None and self._paused.stops_calls and self._has_begun_all

    def take_rest_report(self, overlapping: int) -> Pause | None:
        """Return the pause to report when no call runs any more; otherwise None. Each pause is returned only once."""
        if self._is_rest_reported or self._paused is None or overlapping > self._idle_count or not self._has_begun_all:
            return None
        self._is_rest_reported = True
        return self._paused

    def handle_item(self, item: Work | Item) -> None:
        """Queue a call, or apply another item to the order."""
        if isinstance(item, Hold):
            self._last_noted = max(self._last_noted, item.number)
        elif isinstance(item, Resume):
            self.last_resumed = item.hold
            for number in [number for number in list(self._limits) if number <= item.hold]:
                del self._limits[number]
            self._drop_calls(item.withdrawn)
        elif isinstance(item, Decision):
            self._deferred.pop(item.token, None)
            if item.dropped is not None:
                self._drop_calls(frozenset({item.dropped}))
        elif isinstance(item, DriverChange):
            self._forget_driver(item.base)
        elif isinstance(item, Pause):
            self._end_pauses(item.number - 1)
            self._paused, self._is_rest_reported, self._deferred[-item.number] = item, False, item.last + 1
            self._put_first(call for call in self._waiting if call.is_barrier and call.seq > item.last)
        elif isinstance(item, EndPause):
            self._end_pauses(item.number)
        else:
            self._waiting.append(item)
            if self._paused is not None and item.is_barrier:
                self._put_first([item])

    def _end_pauses(self, number: int) -> None:
        for token in [token for token in list(self._deferred) if -number <= token < 0]:
            del self._deferred[token]
        if self._paused is not None and self._paused.number <= number:
            self._paused = None

    def _put_first(self, calls: Iterable[Work]) -> None:
        """Move barriers ahead of a pause's held-up calls.

        All ranks end up with one order, because they get the same messages.
        """
        assert self._paused is not None
        for call in calls:
            self._places.setdefault(call.seq, self._paused.last + 0.5)
        self._waiting = deque(sorted(self._waiting, key=self._get_place))

    def _get_place(self, call: Work) -> float:
        return self._places.get(call.seq, call.seq)

    def _is_paused(self, call: Work) -> bool:
        return self._paused is not None and call.seq > self._paused.last and not call.is_barrier

    @property
    def _has_begun_all(self) -> bool:
        """Whether all calls up to the pause's last call have begun."""
        return self._paused is None or not self._waiting or self._get_place(self._waiting[0]) > self._paused.last

    @property
    def _idle_count(self) -> int:
        """Number of running calls that are blocked for another lane, or stopped at a pause point."""
        return self.barrier_calls + (self.paused_calls if self._paused is not None and self._paused.stops_calls else 0)

    def _forget_driver(self, base: int) -> None:
        """Drop all state of a former driver. The next driver's first hold may be known already, and is retained."""
        for number in [number for number in list(self._limits) if number <= base]:
            del self._limits[number]
        for token in [token for token, seq in list(self._deferred.items()) if seq <= base or token < 0]:
            del self._deferred[token]
        self._paused = None
        self._places.clear()
        self._last_hold, self._last_noted = max(self._last_hold, base), max(self._last_noted, base)
        self.last_resumed, self.last_reported = max(self.last_resumed, base), max(self.last_reported, base)
        dropped_calls = [call for call in self._waiting if call.seq <= base]
        self.unfinished += dropped_calls
        self._drop_calls(frozenset(call.seq for call in dropped_calls))

    def _drop_calls(self, withdrawn: frozenset[int]) -> None:
        for call in [call for call in self._waiting if call.seq in withdrawn]:
            self._waiting.remove(call)
            call.drop_call()

    def _can_begin(self, call: Work, overlapping: int) -> bool:
        if self._is_limited and self._get_place(call) >= min(
            self._limit_of_holds, min(list(self._deferred.values()), default=_NEVER)
        ):
            return False
        if call.is_barrier:
            return overlapping <= self._idle_count
        # Async methods overlap up to their limit. A sync method begins only when nothing else runs.
        return overlapping < max(1, call.concurrency)

    def _limit_to(self, number: int, failed: int) -> None:
        # Each hold has a separate limit, because the next hold may arrive before the lane has noted the last one's end.
        self._limits[number] = min(self._limits.get(number, _NEVER), failed)

    @property
    def _limit_of_holds(self) -> int:
        return min(list(self._limits.values()), default=_NEVER) if self._stopped_for != self._scope.base else 1

    @property
    def _is_limited(self) -> bool:
        return bool(self._limits or self._deferred) or self._stopped_for == self._scope.base
