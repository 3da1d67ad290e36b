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
    """Queue item that ends a hold. The lane continues without the withdrawn calls."""

    hold: int
    withdrawn: frozenset[int]


@attrs.frozen
class Decided:
    """Queue item with the decision whether a held-up call (`LaneOrder.hold_up`) is dropped."""

    token: int
    dropped: int | None


@attrs.frozen
class Renewed:
    """Queue item that drops the calls of a former driver.

    The next driver's calls and holds have numbers above `base`.
    """

    base: int


@attrs.frozen
class Pause:
    """Queue item that pauses the lane: no call after call `last` begins until a `GoOn` item follows.

    Barriers queued meanwhile move ahead of the held-up calls. With `keeps`, running calls may stop at their next pause
    point once call `last` has begun. `on_rest` is called on the lane when no call runs there any more.
    """

    number: int
    last: int
    keeps: bool
    on_rest: Callable[[], object]


@attrs.frozen
class GoOn:
    """Queue item that ends this pause and all earlier pauses."""

    number: int


Item: TypeAlias = Hold | Resume | Decided | Renewed | Pause | GoOn


class LaneOrder:
    """The queued and running calls of one lane, and the holds and pauses that decide which call may begin.

    Methods called by the receiving thread take effect at once. Queued items keep their place among the calls, and take
    effect when the lane applies them (`note`).

    Attributes:
        running: Running calls by number.
        resumed: Number of the last finished hold, which is equal on all ranks at the beginning of a call.
        reported: Number of the last hold for which this lane has reached the barrier.
        resting: Number of running calls that have stopped at a pause point.
        standing: Number of running calls that only block this lane while another lane runs a call.
        unfinished: Calls of former drivers that have failed here, or never began.
    """

    def __init__(self, scope: Scope) -> None:
        """Make an empty order. Args: scope: Says which drivers' calls are valid, and whether the worker is closing."""
        self.running: dict[int, Work] = {}
        self.unfinished: list[Work] = []
        self.resumed = self.reported = self.resting = self.standing = 0
        self._paused: Pause | None = None
        self._told_rest = False
        # Queue positions of barriers that were moved ahead of a pause's held-up calls.
        self._places: dict[int, float] = {}
        self._scope = scope
        self._waiting: deque[Work] = deque()
        self._held = self._noted = 0
        self._limits: dict[int, int] = {}  # Maps each unfinished hold to the first call that may not begin.
        # Maps each open withdrawal to a call, and each pause (as a negative number) to the first held-up call.
        # The lane begins neither a call in this table nor any later call.
        self._held_up: dict[int, int] = {}
        self._begun = -1
        self._stopped_for = -1  # Base of call numbers of the driver for which the lane has stopped; -1 for none.

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        return len(self._waiting)

    # -- called by the receiving thread

    def hold(self, number: int, failed: int) -> Hold:
        """Begin neither the failed call nor any later call, and return the queue item for the lane.

        Roles are still constructed (call 0), so that every rank with a failing constructor reports the failure.
        """
        self._limit_to(number, max(failed, 1))
        self._held = max(self._held, number)
        return Hold(number)

    def hold_up(self, token: int, seq: int) -> bool:
        """Hold up a call until the driver decides on a withdrawal. Return whether the call hadn't begun yet."""
        # This entry is set before the check, so that the lane sees the entry if a call begins meanwhile.
        self._held_up[token] = seq
        return seq not in self.running and seq > self._begun

    def pause(self, number: int) -> int:
        """Begin no further call, and return the number of the last begun call. A `Pause` or `GoOn` item must follow."""
        # This entry is set before running calls are listed, so that no call begins unnoticed in between.
        self._held_up[-number] = 1
        begun = max((seq for seq, call in list(self.running.items()) if not call.stands), default=0)
        return max(begun, self._begun)

    def stop(self) -> None:
        """Begin no more calls for the present driver, which is about to close."""
        # This mark is set before running calls are checked, so that no call begins unnoticed in between.
        self._stopped_for = self._scope.base

    # -- on the lane

    @property
    def is_plain(self) -> bool:
        """Whether the next arriving call begins at once, because nothing waits or is held. This is the usual case."""
        return not (self._waiting or self._is_limited or self.reported < self._held)

    def next(self, overlapping: int) -> Work | None:
        """Pop the next queued call if a call may begin while `overlapping` async calls run; otherwise return None."""
        if self._waiting and self._scope.closed is None and self._may_begin(self._waiting[0], overlapping):
            return self._waiting.popleft()
        return None

    def next_stand(self, overlapping: int) -> Work | None:
        """Pop the next queued call while a sync call runs.

        Only a barrier, for which the lane stands still, may begin then.
        """
        return self.next(overlapping) if self._waiting and self._waiting[0].stands else None

    def begins(self, call: Work, overlapping: int) -> bool:
        """Record a popped call as running, and return False if the call may not begin after all.

        A hold, the worker's end or a new driver may have come since the call was popped.
        """
        self.running[call.seq] = call
        if self._scope.let_go(call.seq):  # The call's driver has released the worker. A queued `Renewed` item follows.
            del self.running[call.seq]
            self.unfinished.append(call)
            call.drop()
            return False
        if self._scope.closed is None and self._may_begin(call, overlapping):
            if call.stands:
                self._places.pop(call.seq, None)
            else:
                self._begun = call.seq
            return True
        del self.running[call.seq]
        self.put_back(call)
        return False

    def put_back(self, call: Work) -> None:
        """Put a call back at the head of the queue."""
        self._waiting.appendleft(call)

    def failed(self, call: Work) -> None:
        """Record a failed call, and begin neither this call nor later calls until the hold is resumed."""
        if self._scope.let_go(call.seq):  # No driver is left to lead a hold.
            self.unfinished.append(call)
            return
        # This failure starts the next hold, unless a hold is already under way.
        self._noted = self._held = max(self._held, self.resumed + 1)
        self._limit_to(self._held, call.seq)

    def back(self, overlapping: int) -> tuple[int, int] | None:
        """Return (hold, last begun call) when this rank reaches a hold's barrier; otherwise return None.

        A rank has reached the barrier when nothing runs, and no call before the failed call waits. Calls held up by a
        pause don't count. Each hold is returned only once.
        """
        if overlapping > self._at_rest or self.reported >= self._held or self._noted < self._held:
            return None
        first = self._waiting[0] if self._waiting else None
        if first is not None and self._place(first) < self._limit_of_holds and not self._is_paused(first):
            return None
        self.reported = self._held
        return self._held, self._begun

    @property
    def keeps(self) -> bool:
        """Whether running calls should stop at their pause points."""
        return self._paused is not None and self._paused.keeps and self._has_begun_all

    def rests(self, overlapping: int) -> Pause | None:
        """Return the pause to report when no call runs any more; otherwise None. Each pause is returned only once."""
        if self._told_rest or self._paused is None or overlapping > self._at_rest or not self._has_begun_all:
            return None
        self._told_rest = True
        return self._paused

    def note(self, item: Work | Item) -> None:
        """Queue a call, or apply another item to the order."""
        if isinstance(item, Hold):
            self._noted = max(self._noted, item.number)
        elif isinstance(item, Resume):
            self.resumed = item.hold
            for number in [number for number in list(self._limits) if number <= item.hold]:
                del self._limits[number]
            self._drop(item.withdrawn)
        elif isinstance(item, Decided):
            self._held_up.pop(item.token, None)
            if item.dropped is not None:
                self._drop(frozenset({item.dropped}))
        elif isinstance(item, Renewed):
            self._forget(item.base)
        elif isinstance(item, Pause):
            self._end_pauses(item.number - 1)
            self._paused, self._told_rest, self._held_up[-item.number] = item, False, item.last + 1
            self._put_first(call for call in self._waiting if call.stands and call.seq > item.last)
        elif isinstance(item, GoOn):
            self._end_pauses(item.number)
        else:
            self._waiting.append(item)
            if self._paused is not None and item.stands:
                self._put_first([item])

    def _end_pauses(self, number: int) -> None:
        for token in [token for token in list(self._held_up) if -number <= token < 0]:
            del self._held_up[token]
        if self._paused is not None and self._paused.number <= number:
            self._paused = None

    def _put_first(self, calls: Iterable[Work]) -> None:
        """Move barriers ahead of a pause's held-up calls.

        All ranks end up with one order, because they get the same messages.
        """
        assert self._paused is not None
        for call in calls:
            self._places.setdefault(call.seq, self._paused.last + 0.5)
        self._waiting = deque(sorted(self._waiting, key=self._place))

    def _place(self, call: Work) -> float:
        return self._places.get(call.seq, call.seq)

    def _is_paused(self, call: Work) -> bool:
        return self._paused is not None and call.seq > self._paused.last and not call.stands

    @property
    def _has_begun_all(self) -> bool:
        """Whether all calls up to the pause's last call have begun."""
        return self._paused is None or not self._waiting or self._place(self._waiting[0]) > self._paused.last

    @property
    def _at_rest(self) -> int:
        """Number of running calls that are blocked for another lane, or stopped at a pause point."""
        return self.standing + (self.resting if self._paused is not None and self._paused.keeps else 0)

    def _forget(self, base: int) -> None:
        """Drop all state of a former driver. The next driver's first hold may be known already, and is retained."""
        for number in [number for number in list(self._limits) if number <= base]:
            del self._limits[number]
        for token in [token for token, seq in list(self._held_up.items()) if seq <= base or token < 0]:
            del self._held_up[token]
        self._paused = None
        self._places.clear()
        self._held, self._noted = max(self._held, base), max(self._noted, base)
        self.resumed, self.reported = max(self.resumed, base), max(self.reported, base)
        dropped_calls = [call for call in self._waiting if call.seq <= base]
        self.unfinished += dropped_calls
        self._drop(frozenset(call.seq for call in dropped_calls))

    def _drop(self, withdrawn: frozenset[int]) -> None:
        for call in [call for call in self._waiting if call.seq in withdrawn]:
            self._waiting.remove(call)
            call.drop()

    def _may_begin(self, call: Work, overlapping: int) -> bool:
        if self._is_limited and self._place(call) >= min(
            self._limit_of_holds, min(list(self._held_up.values()), default=_NEVER)
        ):
            return False
        if call.stands:
            return overlapping <= self._at_rest
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
        return bool(self._limits or self._held_up) or self._stopped_for == self._scope.base
