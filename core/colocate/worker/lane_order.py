"""Order and the hold, the worker's half: which call a lane begins next. Without threads, sockets and clocks.

After a failed call no rank takes up that call or a later one until all ranks are back; earlier ones it still runs, as
others may wait for their results. This rank stops itself when a call fails here, and on the driver's word when one
failed elsewhere. Holds are numbered; the lane is held while the highest hold that it knows of hasn't been resumed.
`_calls/order.py` has the driver's half.

A lane of a background role can be paused: the ranks agree on the last call that they begin, and nothing after it begins
until they go on, but for calls that have a place in all lanes. For those a lane only stands still.
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
    """A hold has begun; everything that was sent before the failed call comes before this."""

    number: int


@attrs.frozen
class Resume:
    """A hold is over. The lane goes on without the withdrawn calls."""

    hold: int
    withdrawn: frozenset[int]


@attrs.frozen
class Decided:
    """A decision whether a call that was held up is dropped; see `LaneOrder.hold_up`."""

    token: int
    dropped: int | None


@attrs.frozen
class Renewed:
    """A driver has let go; calls and holds of the next one have numbers above the base."""

    base: int


@attrs.frozen
class Pause:
    """Begin no call after this one until `GoOn`; what has come for which the lane stands still comes before those.

    `keeps`: calls that run may stop at their next pause point, once that last one has begun.
    `on_rest`: Called on the lane once nothing goes on here.
    """

    number: int
    last: int
    keeps: bool
    on_rest: Callable[[], object]


@attrs.frozen
class GoOn:
    """A pause is over, and so are those before it."""

    number: int


Item: TypeAlias = Hold | Resume | Decided | Renewed | Pause | GoOn


class LaneOrder:
    """The calls of one lane.

    What is heard by the thread that receives holds at once; what has to keep its place among the calls is an item,
    which the lane notes when it comes to that.

    Attributes:
        running: Those that run, by number.
        resumed: The last hold that is over: the same on all ranks for a call that all of them begin.
        reported: The last hold in which it was back.
        resting: How many of those that run have stopped at a pause point.
        standing: How many of them only stand still for another lane.
        unfinished: Calls of a driver that has let go which have failed here, or never begun.
    """

    def __init__(self, scope: Scope) -> None:
        """Begin with none. Args: scope: Which drivers' calls count, and whether the worker ends."""
        self.running: dict[int, Work] = {}
        self.unfinished: list[Work] = []
        self.resumed = self.reported = self.resting = self.standing = 0
        self._paused: Pause | None = None
        self._told_rest = False
        # Of calls for which it stands still and that come before what a pause holds up, behind which call they come.
        self._places: dict[int, float] = {}
        self._scope = scope
        self._waiting: deque[Work] = deque()
        self._held = self._noted = 0
        self._limits: dict[int, int] = {}  # by hold that isn't over: only calls before this one begin
        # By question, calls that may be withdrawn; by pause, of negative numbers here, the first that it holds up:
        # they and later ones wait.
        self._held_up: dict[int, int] = {}
        self._begun = -1
        self._stopped_for = -1  # the base of the driver that wants nothing begun any more

    @property
    def waiting(self) -> int:
        """How many have come and not begun."""
        return len(self._waiting)

    # -- heard by the thread that receives

    def hold(self, number: int, failed: int) -> Hold:
        """Take up no call from the failed one on. What is returned is an item.

        Roles (call 0) are constructed nevertheless, so that every rank on which that fails says so.
        """
        self._limit_to(number, max(failed, 1))
        self._held = max(self._held, number)
        return Hold(number)

    def hold_up(self, token: int, seq: int) -> bool:
        """Don't begin a call before it is decided whether it is withdrawn; False when it has been begun already."""
        self._held_up[token] = seq  # before looking: what the lane begins after this it has looked at this for
        return seq not in self.running and seq > self._begun

    def pause(self, number: int) -> int:
        """Begin no further call, and return the last one that was begun. A `Pause` or `GoOn` follows."""
        self._held_up[-number] = 1  # before looking, as above
        begun = max((seq for seq, call in list(self.running.items()) if not call.stands), default=0)
        return max(begun, self._begun)

    def stop(self) -> None:
        """Begin nothing any more for this driver, which is about to close."""
        # Before anybody looks at what runs: what the lane begins after this it has looked at this for.
        self._stopped_for = self._scope.base

    # -- on the lane

    @property
    def is_plain(self) -> bool:
        """Whether the next call that comes is the next to begin, as nearly always: nothing waits or is held."""
        return not (self._waiting or self._is_limited or self.reported < self._held)

    def next(self, overlapping: int) -> Work | None:
        """Take the next of those that wait, if it may begin beside so many async ones that run."""
        if self._waiting and self._scope.closed is None and self._may_begin(self._waiting[0], overlapping):
            return self._waiting.popleft()
        return None

    def next_stand(self, overlapping: int) -> Work | None:
        """As `next`, amid a call that isn't async: only what the lane stands still for may begin beside it."""
        return self.next(overlapping) if self._waiting and self._waiting[0].stands else None

    def begins(self, call: Work, overlapping: int) -> bool:
        """Note that a call runs; False when a hold, or the end, has come meanwhile and looked at what runs before."""
        self.running[call.seq] = call
        if self._scope.let_go(call.seq):  # its driver has let go, of which the queue will tell
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
        """Have a call be the next again."""
        self._waiting.appendleft(call)

    def failed(self, call: Work) -> None:
        """A call has failed here: this rank stops by itself."""
        if self._scope.let_go(call.seq):  # nobody leads the hold that would follow
            self.unfinished.append(call)
            return
        # The hold that this failure will lead to is the next one, unless one is under way already.
        self._noted = self._held = max(self._held, self.resumed + 1)
        self._limit_to(self._held, call.seq)

    def back(self, overlapping: int) -> tuple[int, int] | None:
        """A hold, and the highest call begun, if it is to be told now that this rank is back; once for each hold.

        It is when nothing runs, and nothing that came before the failed call waits; but for what a pause holds up.
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
        """Whether calls that run are to stop at their pause points."""
        return self._paused is not None and self._paused.keeps and self._has_begun_all

    def rests(self, overlapping: int) -> Pause | None:
        """A pause, if it is to be told now that it has come to rest: nothing goes on; once for each pause."""
        if self._told_rest or self._paused is None or overlapping > self._at_rest or not self._has_begun_all:
            return None
        self._told_rest = True
        return self._paused

    def note(self, item: Work | Item) -> None:
        """Come to a call, or to another item."""
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
        for each in [each for each in list(self._held_up) if -number <= each < 0]:
            del self._held_up[each]
        if self._paused is not None and self._paused.number <= number:
            self._paused = None

    def _put_first(self, calls: Iterable[Work]) -> None:
        """Have calls come before those that a pause holds up: on all ranks, to which messages come in one order."""
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
        """Whether all calls have begun that come before a pause."""
        return self._paused is None or not self._waiting or self._place(self._waiting[0]) > self._paused.last

    @property
    def _at_rest(self) -> int:
        """How many of those that run don't go on."""
        return self.standing + (self.resting if self._paused is not None and self._paused.keeps else 0)

    def _forget(self, base: int) -> None:
        """Nothing is known of what a driver did that has let go. The next one's first hold may be known already."""
        for number in [number for number in list(self._limits) if number <= base]:
            del self._limits[number]
        for token in [token for token, seq in list(self._held_up.items()) if seq <= base or token < 0]:
            del self._held_up[token]
        self._paused = None
        self._places.clear()
        self._held, self._noted = max(self._held, base), max(self._noted, base)
        self.resumed, self.reported = max(self.resumed, base), max(self.reported, base)
        left = [call for call in self._waiting if call.seq <= base]
        self.unfinished += left
        self._drop(frozenset(call.seq for call in left))

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
        # Async methods overlap up to their own limit; a sync one is a barrier, whose turn comes when nothing runs.
        return overlapping < max(1, call.concurrency)

    def _limit_to(self, number: int, failed: int) -> None:
        # Each hold has its own: the next one may be heard of before the lane has taken note of the end of this one.
        self._limits[number] = min(self._limits.get(number, _NEVER), failed)

    @property
    def _limit_of_holds(self) -> int:
        return min(list(self._limits.values()), default=_NEVER) if self._stopped_for != self._scope.base else 1

    @property
    def _is_limited(self) -> bool:
        return bool(self._limits or self._held_up) or self._stopped_for == self._scope.base
