"""The causes of idle slots, computed only from the times of calls. No device is sampled."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from colocate._calls.records import CallRecord, MoveRecord
from colocate._system.recent import Interval, measure_length, merge_intervals, subtract_intervals
from colocate.features import CALLS

Slot: TypeAlias = tuple[str, int]
"""The name of a group and the index of a slot."""

DRIVER = "the driver"
MOVES = "memory that sleeps or wakes"
_SLACK_S = 0.01
"""Clocks of machines differ: a call that seems to end this much after another call's start may still be the cause."""


@attrs.frozen
class TimedCall:
    """The times of one call, in seconds of `time.time()`.

    Attributes:
        label: Role and method.
        submitted_at: The time of the submission.
        ready_at: The time from which the call could run, because all residents among the arguments existed.
        spans: Start and end of the call on each slot.
    """

    label: str
    submitted_at: float
    ready_at: float
    spans: Mapping[Slot, Interval]

    @property
    def started_at(self) -> float:
        """The start of the call on the first rank."""
        return min(start for start, _ in self.spans.values())

    @property
    def ended_at(self) -> float:
        """The end of the call on the last rank."""
        return max(end for _, end in self.spans.values())


def measure_idle(
    calls: Iterable[TimedCall], moves: Iterable[tuple[Slot, Interval]], windows: Mapping[Slot, Interval]
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
    history = CallHistory(calls, moves)
    waits: dict[Slot, dict[str, float]] = {}
    for slot, window in windows.items():
        causes = waits[slot] = {}
        if moving := history.memory_moves(slot, window):
            causes[MOVES] = measure_length(moving)
        for _, why, seconds in history.idle_gaps(slot, window):
            causes[why] = causes.get(why, 0.0) + seconds
    return waits


class CallHistory:
    """The calls and moves of memory within a time, sorted for queries by slot."""

    def __init__(self, calls: Iterable[TimedCall], moves: Iterable[tuple[Slot, Interval]]) -> None:
        """Sort calls and moves by time. The arguments are those of `measure_idle`."""
        self._calls_by_end = sorted([each for each in calls if each.spans], key=lambda each: each.ended_at)
        self._ends = [each.ended_at for each in self._calls_by_end]
        self._moves_by_slot: dict[Slot, list[Interval]] = {}
        for slot, interval in moves:
            self._moves_by_slot.setdefault(slot, []).append(interval)

    def memory_moves(self, slot: Slot, window: Interval) -> list[Interval]:
        """Return the intervals within a window in which memory moved on a slot."""
        return clip_intervals(merge_intervals(self._moves_by_slot.get(slot, ())), *window)

    def slot_calls(self, slot: Slot) -> list[tuple[Interval, TimedCall]]:
        """Return a slot's calls with their intervals, sorted by start on this slot."""
        return sorted(
            [(each.spans[slot], each) for each in self._calls_by_end if slot in each.spans], key=lambda each: each[0]
        )

    def idle_gaps(self, slot: Slot, window: Interval) -> Iterator[tuple[TimedCall | None, str, float]]:
        """Yield the idle gaps of a slot, each as the call after the gap, the cause, and the seconds."""
        since, until = window
        moving, last = self.memory_moves(slot, window), since
        gaps: list[tuple[float, float, TimedCall | None]] = []
        for (start, end), next_call in self.slot_calls(slot):
            if start > last:
                gaps.append((last, min(start, until), next_call))
            last = max(last, end)
        if until > last:
            gaps.append((last, until, None))
        for start, end, then in gaps:
            for free in subtract_intervals(clip_intervals([(start, end)], since, until), moving):
                for why, seconds in _explain_gap(slot, free, then, self._calls_by_end, self._ends):
                    yield then, why, seconds


def _explain_gap(
    slot: Slot, gap: Interval, then: TimedCall | None, by_end: Sequence[TimedCall], ends: Sequence[float]
) -> Iterator[tuple[str, float]]:
    """Yield the causes of a gap, each with its seconds.

    `then` is the call after the gap; None for no call yet.
    """
    start, end = gap
    submitted = end if then is None else min(end, max(start, then.submitted_at))
    could = end if then is None else min(end, max(submitted, then.ready_at))
    uncovered = [(start, could)]
    for other in reversed(by_end[bisect_right(ends, start) : bisect_right(ends, could + _SLACK_S)]):
        if other is then:
            continue
        span = other.spans.get(slot)
        began, why = (other.started_at, other.label) if span is None else (span[1], f"the last ranks of {other.label}")
        rest = [part for free in uncovered for part in subtract_intervals([free], [(began, other.ended_at)])]
        if (seconds := measure_length(uncovered) - measure_length(rest)) > 0:
            yield why, seconds
        uncovered = rest
    if (seconds := measure_length(uncovered) + end - could) > 0:
        yield DRIVER, seconds


def clip_intervals(intervals: Iterable[Interval], since: float, until: float) -> list[Interval]:
    """Return the parts of intervals that are between two times."""
    return [(max(start, since), min(end, until)) for start, end in intervals if start < until and end > since]


@attrs.define(eq=False)
class IdleTracker:
    """A record of the last calls and moves of memory, with a limited size. Not thread-safe."""

    slot_of: Callable[[str, str, int], int]  # Returns the slot of a rank, given the group, the role and the rank.
    max_calls: int  # The limit on the ranks of all recorded calls together, and on recorded moves.
    _calls: deque[TimedCall] = attrs.field(factory=deque, init=False)
    _ranks: int = attrs.field(default=0, init=False)  # The number of ranks in `_calls`.
    _moves: deque[tuple[Slot, Interval]] = attrs.field(factory=deque, init=False)

    def add_call(self, record: CallRecord) -> None:
        """Record a finished call, except sleeps and wakes, which `add_move` records."""
        if record.ran and CALLS.get(record.method) != "memory":
            self._calls.append(self._time_call(record))
            self._ranks += len(record.ran)
            while self._ranks > self.max_calls:
                self._ranks -= len(self._calls.popleft().spans)

    def _time_call(self, record: CallRecord) -> TimedCall:
        ran = {
            (record.group, self.slot_of(record.group, record.role, rank)): (start, end)
            for rank, start, end in record.ran
        }
        return TimedCall(call_label(record.role, record.method), record.submitted, record.ready, ran)

    def add_move(self, record: MoveRecord) -> None:
        """Record a move of a role's memory."""
        slot = record.group, self.slot_of(record.group, record.role, record.rank)
        self._moves.append((slot, (record.start, record.end)))
        if len(self._moves) > self.max_calls:
            self._moves.popleft()

    def forget_before(self, before: float) -> None:
        """Remove calls and moves that ended before a time."""
        while self._calls and self._calls[0].ended_at < before:
            self._ranks -= len(self._calls.popleft().spans)
        while self._moves and self._moves[0][1][1] < before:
            self._moves.popleft()

    def list_slots(self) -> set[Slot]:
        """Return the slots of all recorded calls and moves."""
        return {slot for call in self._calls for slot in call.spans} | {slot for slot, _ in self._moves}

    def copy_records(self) -> tuple[list[TimedCall], list[tuple[Slot, Interval]]]:
        """Return copies of the recorded calls and moves, as arguments for `measure_idle`."""
        return list(self._calls), list(self._moves)


def call_label(role: str, method: str) -> str:
    """Return the label of a call as "role.method", or only the method if there is no role."""
    return f"{role}.{method}" if role else method
