"""The causes of idle slots, computed only from the times of calls. No device is sampled."""

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
"""The name of a group and the index of a slot."""

DRIVER = "the driver"
MOVES = "memory that sleeps or wakes"
_SLACK_S = 0.01
"""Clocks of machines differ: a call that seems to end this much after another call's start may still be the cause."""


@attrs.frozen
class Called:
    """The times of one call, in seconds of `time.time()`.

    Attributes:
        label: Role and method.
        submitted: The time of the submission.
        ready: The time from which the call could run, because all residents among the arguments existed.
        ran: Start and end of the call on each slot.
    """

    label: str
    submitted: float
    ready: float
    ran: Mapping[Slot, Interval]

    @property
    def start(self) -> float:
        """The start of the call on the first rank."""
        return min(start for start, _ in self.ran.values())

    @property
    def end(self) -> float:
        """The end of the call on the last rank."""
        return max(end for _, end in self.ran.values())


def idle(
    calls: Iterable[Called], moves: Iterable[tuple[Slot, Interval]], windows: Mapping[Slot, Interval]
) -> dict[Slot, dict[str, float]]:
    """Return how many seconds each slot ran nothing, by cause.

    While memory moves, even during a call, a slot waits for the move. Between two calls, a slot waits for calls that
    ran on other slots and had ended when the later call was made. These are other ranks of the slot's own call ("the
    last ranks of rollout.run"), or another call. The driver can't have waited for a call that ended later. The
    remaining time counts as the driver's: for its own work, and for sending the message.

    Args:
        calls: All calls of all groups in the windows, including functions. Sleeps and wakes are in `moves` instead.
        moves: The slot and the interval of each move of memory.
        windows: The slots to report on, each with an interval.
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
    """The calls and moves of memory within a time, sorted for queries by slot."""

    def __init__(self, calls: Iterable[Called], moves: Iterable[tuple[Slot, Interval]]) -> None:
        """Sort calls and moves by time. The arguments are those of `idle`."""
        self._by_end = sorted([each for each in calls if each.ran], key=lambda each: each.end)
        self._ends = [each.end for each in self._by_end]
        self._moved: dict[Slot, list[Interval]] = {}
        for slot, interval in moves:
            self._moved.setdefault(slot, []).append(interval)

    def moving(self, slot: Slot, window: Interval) -> list[Interval]:
        """Return the intervals within a window in which memory moved on a slot."""
        return cut(merged(self._moved.get(slot, ())), *window)

    def own(self, slot: Slot) -> list[tuple[Interval, Called]]:
        """Return a slot's calls with their intervals, sorted by start on this slot."""
        return sorted([(each.ran[slot], each) for each in self._by_end if slot in each.ran], key=lambda each: each[0])

    def gaps(self, slot: Slot, window: Interval) -> Iterator[tuple[Called | None, str, float]]:
        """Yield the idle gaps of a slot, each as the call after the gap, the cause, and the seconds."""
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
    """Yield the causes of a gap, with the seconds.

    `then` is the call after the gap; None for no call yet.
    """
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
    """Return the parts of intervals that are between two times."""
    return [(max(start, since), min(end, until)) for start, end in intervals if start < until and end > since]


@attrs.define(eq=False)
class Idling:
    """A record of the last calls and moves of memory, with a limited size. Not thread-safe."""

    slot_of: Callable[[str, str, int], int]  # Returns the slot of a rank, given the group, the role and the rank.
    most: int  # The limit on the recorded ranks of calls, and on moves.
    _calls: deque[Called] = attrs.field(factory=deque, init=False)
    _ranks: int = attrs.field(default=0, init=False)  # The number of ranks in `_calls`.
    _moves: deque[tuple[Slot, Interval]] = attrs.field(factory=deque, init=False)

    def add(self, record: CallRecord) -> None:
        """Record a finished call, except sleeps and wakes, which `move` records."""
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
        """Record a move of a role's memory."""
        slot = record.group, self.slot_of(record.group, record.role, record.rank)
        self._moves.append((slot, (record.start, record.end)))
        if len(self._moves) > self.most:
            self._moves.popleft()

    def forget(self, before: float) -> None:
        """Remove calls and moves that ended before a time."""
        while self._calls and self._calls[0].end < before:
            self._ranks -= len(self._calls.popleft().ran)
        while self._moves and self._moves[0][1][1] < before:
            self._moves.popleft()

    def slots(self) -> set[Slot]:
        """Return the slots of all recorded calls and moves."""
        return {slot for call in self._calls for slot in call.ran} | {slot for slot, _ in self._moves}

    def copy(self) -> tuple[list[Called], list[tuple[Slot, Interval]]]:
        """Return copies of the recorded calls and moves, as arguments for `idle`."""
        return list(self._calls), list(self._moves)


def label_of(role: str, method: str) -> str:
    """Return the label of a call as "role.method", or only the method if there is no role."""
    return f"{role}.{method}" if role else method
