"""What slots waited for while they ran nothing, as the order of calls tells: without a look at any device."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from colocate._calls.records import CallRecord, MoveRecord
from colocate._system.recent import Interval, length, merged, without
from colocate.features import CALLS

Slot: TypeAlias = tuple[str, int]
"""A group's name, and a slot of it."""

DRIVER = "the driver"
MOVES = "memory that sleeps or wakes"
_SLACK_S = 0.01
"""What ended so much after the next call was made may have been waited for: machines' clocks differ."""


@attrs.frozen
class Called:
    """A call, as who waits for it knows it; all times in seconds of time.time().

    Attributes:
        label: What it is called: role and method.
        submitted: When it was submitted.
        ready: When it could have run: all kept results that it uses were there, too.
        ran: From when to when each of its slots ran it.
    """

    label: str
    submitted: float
    ready: float
    ran: Mapping[Slot, Interval]

    @property
    def start(self) -> float:
        """When its first rank began."""
        return min(start for start, _ in self.ran.values())

    @property
    def end(self) -> float:
        """When its last rank ended."""
        return max(end for _, end in self.ran.values())


def idle(
    calls: Iterable[Called], moves: Iterable[tuple[Slot, Interval]], windows: Mapping[Slot, Interval]
) -> dict[Slot, dict[str, float]]:
    """Return for how many seconds each slot ran nothing, by what it waited for.

    While memory moves, also amid a call, a slot waits for that. Between two calls it waits for what ran elsewhere and
    had ended when the later one was made: for the other ranks of a call of its own ("the last ranks of rollout.run"),
    or for another call. What went on longer can't be what the driver waited for. The rest is the driver's: its own
    work, and the way of the message.

    Args:
        calls: All calls of the time, of all groups; functions too, but no sleeps and wakes, which `moves` has.
        moves: Where memory moved, and when.
        windows: The slots that are asked for, and from when to when.
    """
    known = Known(calls, moves)
    found: dict[Slot, dict[str, float]] = {}
    for slot, window in windows.items():
        causes = found[slot] = {}
        if moving := known.moving(slot, window):
            causes[MOVES] = length(moving)
        for _, why, seconds in known.gaps(slot, window):
            causes[why] = causes.get(why, 0.0) + seconds
    return found


class Known:
    """Calls and moves of memory, in order."""

    def __init__(self, calls: Iterable[Called], moves: Iterable[tuple[Slot, Interval]]) -> None:
        """Put them in order; see `idle`."""
        self._by_end = sorted([each for each in calls if each.ran], key=lambda each: each.end)
        self._ends = [each.end for each in self._by_end]
        self._moved: dict[Slot, list[Interval]] = {}
        for slot, interval in moves:
            self._moved.setdefault(slot, []).append(interval)

    def moving(self, slot: Slot, window: Interval) -> list[Interval]:
        """Return when memory moved on a slot within a window."""
        return cut(merged(self._moved.get(slot, ())), *window)

    def own(self, slot: Slot) -> list[tuple[Interval, Called]]:
        """Return a slot's calls, in the order in which they began there."""
        return sorted([(each.ran[slot], each) for each in self._by_end if slot in each.ran], key=lambda each: each[0])

    def gaps(self, slot: Slot, window: Interval) -> Iterator[tuple[Called | None, str, float]]:
        """Yield before which call a slot ran nothing, and no memory moved; why, and for how many seconds."""
        since, until = window
        moving, last = self.moving(slot, window), since
        gaps: list[tuple[float, float, Called | None]] = []
        for (start, end), each in self.own(slot):
            if start > last:
                gaps.append((last, min(start, until), each))
            last = max(last, end)
        if until > last:
            gaps.append((last, until, None))
        for start, end, then in gaps:
            for free in without(cut([(start, end)], since, until), moving):
                for why, seconds in _why(slot, free, then, self._by_end, self._ends):
                    yield then, why, seconds


def _why(
    slot: Slot, gap: Interval, then: Called | None, by_end: Sequence[Called], ends: Sequence[float]
) -> Iterator[tuple[str, float]]:
    """Yield what a slot waited for in a gap before a call (None: there is none yet), and how long."""
    start, end = gap
    asked = end if then is None else min(end, max(start, then.submitted))
    could = end if then is None else min(end, max(asked, then.ready))
    left = [(start, could)]
    for each in reversed(by_end[bisect_right(ends, start) : bisect_right(ends, could + _SLACK_S)]):
        if each is then:
            continue
        here = each.ran.get(slot)
        began, why = (each.start, each.label) if here is None else (here[1], f"the last ranks of {each.label}")
        rest = [part for free in left for part in without([free], [(began, each.end)])]
        if (seconds := length(left) - length(rest)) > 0:
            yield why, seconds
        left = rest
    if (seconds := length(left) + end - could) > 0:
        yield DRIVER, seconds


def cut(intervals: Iterable[Interval], since: float, until: float) -> list[Interval]:
    """Return what of some intervals lies between two times."""
    return [(max(start, since), min(end, until)) for start, end in intervals if start < until and end > since]


@attrs.define(eq=False)
class Idling:
    """What is known of the last calls and moves of memory. Not for several threads at once."""

    slot_of: Callable[[str, str, int], int]  # of a group, a role and a rank
    most: int  # so many ranks' calls are kept
    _calls: deque[Called] = attrs.field(factory=deque, init=False)
    _ranks: int = attrs.field(default=0, init=False)  # of these
    _moves: deque[tuple[Slot, Interval]] = attrs.field(factory=deque, init=False)

    def add(self, record: CallRecord) -> None:
        """Note a call that has ended. That of a sleep or a wake is left out, of which each move is told."""
        if record.ran and CALLS.get(record.method) != "memory":
            self._calls.append(self._called(record))
            self._ranks += len(record.ran)
            while self._ranks > self.most:
                self._ranks -= len(self._calls.popleft().ran)

    def _called(self, record: CallRecord) -> Called:
        ran = {
            (record.group, self.slot_of(record.group, record.role, rank)): (start, end)
            for rank, start, end in record.ran
        }
        return Called(label_of(record.role, record.method), record.submitted, record.ready, ran)

    def move(self, record: MoveRecord) -> None:
        """Note that memory has moved."""
        slot = record.group, self.slot_of(record.group, record.role, record.rank)
        self._moves.append((slot, (record.start, record.end)))
        if len(self._moves) > self.most:
            self._moves.popleft()

    def forget(self, before: float) -> None:
        """Forget what had ended before a time."""
        while self._calls and self._calls[0].end < before:
            self._ranks -= len(self._calls.popleft().ran)
        while self._moves and self._moves[0][1][1] < before:
            self._moves.popleft()

    def slots(self) -> set[Slot]:
        """Return the slots of which something is known."""
        return {slot for each in self._calls for slot in each.ran} | {slot for slot, _ in self._moves}

    def copy(self) -> tuple[list[Called], list[tuple[Slot, Interval]]]:
        """Return the calls, in the order in which they were told, and the moves, as `idle` takes them."""
        return list(self._calls), list(self._moves)


def label_of(role: str, method: str) -> str:
    """Return what a call is called."""
    return f"{role}.{method}" if role else method
