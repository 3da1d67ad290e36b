"""Order and the hold, the worker's half: which call a lane begins next. Without threads, sockets and clocks.

After a failed call no rank takes up that call or a later one until all ranks are back; earlier ones it still runs, as
others may wait for their results. This rank stops itself when a call fails here, and on the driver's word when one
failed elsewhere. Holds are numbered; the lane is held while the highest hold that it knows of hasn't been resumed.
`_calls/order.py` has the driver's half.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

import attrs

from colocate.worker.serving.scope import Scope

_NEVER = sys.maxsize


class Call(Protocol):
    """What is known of a call here: its number, and how many may overlap (0: a sync one, a barrier)."""

    seq: int
    concurrency: int
    on_drop: Callable[[], None] | None


C = TypeVar("C", bound=Call)


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
    """It is decided whether a call that was held up is dropped; see `LaneOrder.hold_up`."""

    token: int
    dropped: int | None


@attrs.frozen
class Renewed:
    """A driver has let go; calls and holds of the next one have numbers above the base."""

    base: int


Item: TypeAlias = Hold | Resume | Decided | Renewed


class LaneOrder(Generic[C]):
    """The calls of one lane.

    What is heard by the thread that receives holds at once; what has to keep its place among the calls is an item,
    which the lane notes when it comes to that.

    Attributes:
        running: Those that run, by number.
        resumed: The last hold that is over: the same on all ranks for a call that all of them begin.
    """

    def __init__(self, scope: Scope) -> None:
        """Begin with none. Args: scope: Which drivers' calls count, and whether the worker ends."""
        self.running: dict[int, C] = {}
        self.resumed = 0
        self._scope = scope
        self._waiting: deque[C] = deque()
        self._held = self._noted = self._reported = 0
        self._limits: dict[int, int] = {}  # by hold that isn't over: only calls before this one begin
        self._held_up: dict[int, int] = {}  # calls that may be withdrawn: they and later ones wait, by question
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

    def stop(self) -> None:
        """Begin nothing any more for this driver, which is about to close."""
        # Before anybody looks at what runs: what the lane begins after this it has looked at this for.
        self._stopped_for = self._scope.base

    # -- on the lane

    @property
    def is_plain(self) -> bool:
        """Whether the next call that comes is the next to begin, as nearly always: nothing waits or is held."""
        return not (self._waiting or self._is_limited or self._reported < self._held)

    def next(self, overlapping: int) -> C | None:
        """Take the next of those that wait, if it may begin beside so many async ones that run."""
        if self._waiting and self._scope.closed is None and self._may_begin(self._waiting[0], overlapping):
            return self._waiting.popleft()
        return None

    def begins(self, call: C, overlapping: int) -> bool:
        """Note that a call runs; False when a hold, or the end, has come meanwhile and looked at what runs before."""
        self.running[call.seq] = call
        if self._scope.let_go(call.seq):  # its driver has let go, of which the queue will tell
            del self.running[call.seq]
            _dropped(call)
            return False
        if self._scope.closed is None and self._may_begin(call, overlapping):
            self._begun = call.seq
            return True
        del self.running[call.seq]
        self.put_back(call)
        return False

    def put_back(self, call: C) -> None:
        """Have a call be the next again."""
        self._waiting.appendleft(call)

    def failed(self, call: C) -> None:
        """A call has failed here: this rank stops by itself."""
        if self._scope.let_go(call.seq):  # nobody leads the hold that would follow
            return
        # The hold that this failure will lead to is the next one, unless one is under way already.
        self._noted = self._held = max(self._held, self.resumed + 1)
        self._limit_to(self._held, call.seq)

    def back(self, overlapping: int) -> tuple[int, int] | None:
        """A hold, and the highest call begun, if it is to be told now that this rank is back; once for each hold.

        It is when nothing runs, and nothing that came before the failed call waits.
        """
        if overlapping or self._reported >= self._held or self._noted < self._held:
            return None
        if self._waiting and self._waiting[0].seq < self._limit_of_holds:
            return None
        self._reported = self._held
        return self._held, self._begun

    def note(self, item: C | Item) -> None:
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
        else:
            self._waiting.append(item)

    def _forget(self, base: int) -> None:
        """Nothing is known of what a driver did that has let go. The next one's first hold may be known already."""
        for number in [number for number in list(self._limits) if number <= base]:
            del self._limits[number]
        for token in [token for token, seq in list(self._held_up.items()) if seq <= base]:
            del self._held_up[token]
        self._held, self._noted = max(self._held, base), max(self._noted, base)
        self.resumed, self._reported = max(self.resumed, base), max(self._reported, base)
        self._drop(frozenset(call.seq for call in self._waiting if call.seq <= base))

    def _drop(self, withdrawn: frozenset[int]) -> None:
        for call in [call for call in self._waiting if call.seq in withdrawn]:
            self._waiting.remove(call)
            _dropped(call)

    def _may_begin(self, call: C, overlapping: int) -> bool:
        if self._is_limited and call.seq >= min(
            self._limit_of_holds, min(list(self._held_up.values()), default=_NEVER)
        ):
            return False
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


def _dropped(call: Call) -> None:
    if call.on_drop is not None:
        call.on_drop()
