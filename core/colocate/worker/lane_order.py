"""Order and the hold, the worker's half: the choice of a lane's next call, without threads, sockets and clocks.

After a failed call no rank begins that call or a later one until all ranks are back; earlier ones still run, as other
ranks may wait for their results. This rank stops by itself when a call fails here, and on the driver's word when one
failed elsewhere. Holds are numbered; the lane is held while its highest known hold hasn't been resumed.
`_calls/order.py` has the driver's half.

The lane of a background role can be paused: the ranks agree on the last call to begin, and no later one begins until
they go on, except for calls with a place in all lanes. For those a lane only stands still.
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
    """A hold has begun; everything sent before the failed call comes before this item."""

    number: int


@attrs.frozen
class Resume:
    """A hold is over. The lane goes on without the withdrawn calls."""

    hold: int
    withdrawn: frozenset[int]


@attrs.frozen
class Decided:
    """Decision whether a held-up call is dropped; see `LaneOrder.hold_up`."""

    token: int
    dropped: int | None


@attrs.frozen
class Renewed:
    """A driver has released the worker; numbers of the next driver's calls and holds are above the base."""

    base: int


@attrs.frozen
class Pause:
    """Begin no call after `last` until `GoOn`; a barrier queued meanwhile is moved before the held-up calls.

    `keeps`: running calls may stop at their next pause point, once the last call has begun.
    `on_rest`: Called on the lane once nothing runs here.
    """

    number: int
    last: int
    keeps: bool
    on_rest: Callable[[], object]


@attrs.frozen
class GoOn:
    """End a pause, and all pauses before."""

    number: int


Item: TypeAlias = Hold | Resume | Decided | Renewed | Pause | GoOn


class LaneOrder:
    """The calls of one lane.

    Methods of the receiving thread hold at once; items keep their place among the calls, and take effect when the lane
    notes them.

    Attributes:
        running: Running calls by number.
        resumed: The last finished hold: equal on all ranks for a call that all ranks begin.
        reported: The last hold in which this lane was back.
        resting: Number of running calls that have stopped at a pause point.
        standing: Number of running calls that only stand still for another lane.
        unfinished: A former driver's calls that have failed here, or never begun.
    """

    def __init__(self, scope: Scope) -> None:
        """Make an empty order. Args: scope: Says which drivers' calls count, and whether the worker ends."""
        self.running: dict[int, Work] = {}
        self.unfinished: list[Work] = []
        self.resumed = self.reported = self.resting = self.standing = 0
        self._paused: Pause | None = None
        self._told_rest = False
        # Places of barriers that were moved before a pause's held-up calls.
        self._places: dict[int, float] = {}
        self._scope = scope
        self._waiting: deque[Work] = deque()
        self._held = self._noted = 0
        self._limits: dict[int, int] = {}  # by unfinished hold, the first call that doesn't begin
        # By question, calls that may be withdrawn; by pause (as negative numbers), the first held-up call. These and
        # later calls wait.
        self._held_up: dict[int, int] = {}
        self._begun = -1
        self._stopped_for = -1  # the base of the driver that stops

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        return len(self._waiting)

    # -- called by the receiving thread

    def hold(self, number: int, failed: int) -> Hold:
        """Begin no call from the failed one on; return the item for the lane.

        Roles (call 0) are constructed nevertheless, so that every rank with a failing constructor reports the failure.
        """
        self._limit_to(number, max(failed, 1))
        self._held = max(self._held, number)
        return Hold(number)

    def hold_up(self, token: int, seq: int) -> bool:
        """Hold up a call until a decision about the withdrawal; False if the call has begun already."""
        # Set before the check: a call that the lane begins later is checked against this entry.
        self._held_up[token] = seq
        return seq not in self.running and seq > self._begun

    def pause(self, number: int) -> int:
        """Begin no further call, and return the number of the last begun one. A `Pause` or `GoOn` follows."""
        self._held_up[-number] = 1  # set before the check, as above
        begun = max((seq for seq, call in list(self.running.items()) if not call.stands), default=0)
        return max(begun, self._begun)

    def stop(self) -> None:
        """Begin no call any more for a driver that will close."""
        # Set before any check of running calls: a call that the lane begins later is checked against this value.
        self._stopped_for = self._scope.base

    # -- on the lane

    @property
    def is_plain(self) -> bool:
        """Whether the next arriving call begins at once, as nearly always: nothing waits or is held."""
        return not (self._waiting or self._is_limited or self.reported < self._held)

    def next(self, overlapping: int) -> Work | None:
        """Pop the next queued call, if the call may begin beside this number of running async calls."""
        if self._waiting and self._scope.closed is None and self._may_begin(self._waiting[0], overlapping):
            return self._waiting.popleft()
        return None

    def next_stand(self, overlapping: int) -> Work | None:
        """Pop the next item during a sync call: only a barrier, for which the lane stands still, may begin."""
        return self.next(overlapping) if self._waiting and self._waiting[0].stands else None

    def begins(self, call: Work, overlapping: int) -> bool:
        """Record a call as running; False if a hold, or the end, has come meanwhile, after a check of running calls."""
        self.running[call.seq] = call
        if self._scope.let_go(call.seq):  # the call's driver has released the worker, and a queued item will say so
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
        """Queue a call again as the next one."""
        self._waiting.appendleft(call)

    def failed(self, call: Work) -> None:
        """Record a failed call: this rank stops by itself."""
        if self._scope.let_go(call.seq):  # no driver leads the hold that would follow
            self.unfinished.append(call)
            return
        # The hold that follows this failure is the next one, unless a hold is under way already.
        self._noted = self._held = max(self._held, self.resumed + 1)
        self._limit_to(self._held, call.seq)

    def back(self, overlapping: int) -> tuple[int, int] | None:
        """Return a hold to report and the highest call begun, once for each hold, when this rank is back.

        A rank is back when nothing runs, and no call before the failed one waits, except for calls held up by a pause.
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
        """Return a pause to report, once for each pause, when nothing runs."""
        if self._told_rest or self._paused is None or overlapping > self._at_rest or not self._has_begun_all:
            return None
        self._told_rest = True
        return self._paused

    def note(self, item: Work | Item) -> None:
        """Queue a call, or apply another item."""
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
        """Move barriers before a pause's held-up calls: on all ranks, which get messages in one order."""
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
        """Whether all calls before a pause have begun."""
        return self._paused is None or not self._waiting or self._place(self._waiting[0]) > self._paused.last

    @property
    def _at_rest(self) -> int:
        """Number of running calls that stand still or rest."""
        return self.standing + (self.resting if self._paused is not None and self._paused.keeps else 0)

    def _forget(self, base: int) -> None:
        """Drop all state of a former driver. The next driver's first hold may be known already."""
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
        # Async methods overlap up to their limit; a sync one is a barrier that begins when nothing runs.
        return overlapping < max(1, call.concurrency)

    def _limit_to(self, number: int, failed: int) -> None:
        # Each hold has a separate limit: the next hold may arrive before the lane has noted the end of the last.
        self._limits[number] = min(self._limits.get(number, _NEVER), failed)

    @property
    def _limit_of_holds(self) -> int:
        return min(list(self._limits.values()), default=_NEVER) if self._stopped_for != self._scope.base else 1

    @property
    def _is_limited(self) -> bool:
        return bool(self._limits or self._held_up) or self._stopped_for == self._scope.base
