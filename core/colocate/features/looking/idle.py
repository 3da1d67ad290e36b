"""The causes of idle slots, from the order of calls alone: no device is sampled."""

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
"""A group's name and the index of a slot."""

DRIVER = "the driver"
MOVES = "memory that sleeps or wakes"
_SLACK_S = 0.01
"""Clocks of machines differ: a call that ended up to this long after the next one was made may be its cause."""


@attrs.frozen
class Called:
    """The timing of a call; all times in seconds of time.time().

    Attributes:
        label: Role and method.
        submitted: The time of the submission.
        ready: The time from which it could run: all kept results among its arguments existed.
        ran: Start and end on each of its slots.
    """

    label: str
    submitted: float
    ready: float
    ran: Mapping[Slot, Interval]

    @property
    def start(self) -> float:
        """The start of the first rank."""
        return min(start for start, _ in self.ran.values())

    @property
    def end(self) -> float:
        """The end of the last rank."""
        return max(end for _, end in self.ran.values())


def idle(
    calls: Iterable[Called], moves: Iterable[tuple[Slot, Interval]], windows: Mapping[Slot, Interval]
) -> dict[Slot, dict[str, float]]:
    """Return how many seconds each slot ran nothing, by cause.

    While memory moves, also amid a call, a slot waits for the move. Between two calls it waits for calls that ran
    elsewhere and had ended when the later one was made: the other ranks of its own call ("the last ranks of
    rollout.run"), or another call. The driver can't have waited for a call that ended later. The rest is the driver's:
    its own work, and the way of the message.

    Args:
        calls: All calls of the time, of all groups, with functions; no sleeps and wakes: `moves` has these.
        moves: The slot and the interval of each move of memory.
        windows: The slots to report on, each with its interval.
    """
    history = Known(calls, moves)
    waits: dict[Slot, dict[str, float]] = {}
    for slot, window in windows.items():
        causes = waits[slot] = {}
        if moving := history.moving(slot, window):
            causes[MOVES] = length(moving)
        for _, why, seconds in history.gaps(slot, window):
            causes[why] = causes.get(why, 0.0) + seconds
    return waits


class Known:
    """Calls and moves of memory, sorted by time."""

    def __init__(self, calls: Iterable[Called], moves: Iterable[tuple[Slot, Interval]]) -> None:
        """Sort calls and moves; see `idle`."""
        self._by_end = sorted([each for each in calls if each.ran], key=lambda each: each.end)
        self._ends = [each.end for each in self._by_end]
        self._moved: dict[Slot, list[Interval]] = {}
        for slot, interval in moves:
            self._moved.setdefault(slot, []).append(interval)

    def moving(self, slot: Slot, window: Interval) -> list[Interval]:
        """Return the intervals within a window in which memory moved on a slot."""
        return cut(merged(self._moved.get(slot, ())), *window)

    def own(self, slot: Slot) -> list[tuple[Interval, Called]]:
        """Return a slot's calls, sorted by their start there."""
        return sorted([(each.ran[slot], each) for each in self._by_end if slot in each.ran], key=lambda each: each[0])

    def gaps(self, slot: Slot, window: Interval) -> Iterator[tuple[Called | None, str, float]]:
        """Yield the idle gaps of a slot: the call after the gap, the cause, and the seconds."""
        since, until = window
        moving, last = self.moving(slot, window), since
        gaps: list[tuple[float, float, Called | None]] = []
        for (start, end), next_call in self.own(slot):
            if start > last:
                gaps.append((last, min(start, until), next_call))
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
    """Yield the causes of a gap before the call `then` (None for no call yet), with their seconds."""
    start, end = gap
    submitted = end if then is None else min(end, max(start, then.submitted))
    could = end if then is None else min(end, max(submitted, then.ready))
    uncovered = [(start, could)]
    for other in reversed(by_end[bisect_right(ends, start) : bisect_right(ends, could + _SLACK_S)]):
        if other is then:
            continue
        span = other.ran.get(slot)
        began, why = (other.start, other.label) if span is None else (span[1], f"the last ranks of {other.label}")
        rest = [part for free in uncovered for part in without([free], [(began, other.end)])]
        if (seconds := length(uncovered) - length(rest)) > 0:
            yield why, seconds
        uncovered = rest
    if (seconds := length(uncovered) + end - could) > 0:
        yield DRIVER, seconds


def cut(intervals: Iterable[Interval], since: float, until: float) -> list[Interval]:
    """Return the parts of intervals that lie between two times."""
    return [(max(start, since), min(end, until)) for start, end in intervals if start < until and end > since]


@attrs.define(eq=False)
class Idling:
    """The last calls and moves of memory. Not thread-safe."""

    slot_of: Callable[[str, str, int], int]  # from group, role and rank
    most: int  # the limit on recorded ranks of calls, and on moves
    _calls: deque[Called] = attrs.field(factory=deque, init=False)
    _ranks: int = attrs.field(default=0, init=False)  # the ranks in `_calls`
    _moves: deque[tuple[Slot, Interval]] = attrs.field(factory=deque, init=False)

    def add(self, record: CallRecord) -> None:
        """Record a finished call, except a sleep or wake: `move` records these."""
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
        """Record a move of memory."""
        slot = record.group, self.slot_of(record.group, record.role, record.rank)
        self._moves.append((slot, (record.start, record.end)))
        if len(self._moves) > self.most:
            self._moves.popleft()

    def forget(self, before: float) -> None:
        """Drop calls and moves that ended before a time."""
        while self._calls and self._calls[0].end < before:
            self._ranks -= len(self._calls.popleft().ran)
        while self._moves and self._moves[0][1][1] < before:
            self._moves.popleft()

    def slots(self) -> set[Slot]:
        """Return the slots of all recorded calls and moves."""
        return {slot for call in self._calls for slot in call.ran} | {slot for slot, _ in self._moves}

    def copy(self) -> tuple[list[Called], list[tuple[Slot, Interval]]]:
        """Return calls and moves in the order of the records, as arguments for `idle`."""
        return list(self._calls), list(self._moves)


def label_of(role: str, method: str) -> str:
    """Return a call's label from role and method."""
    return f"{role}.{method}" if role else method
