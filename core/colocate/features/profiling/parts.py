"""Splits the time of profiled slots by method, so that each moment of a slot belongs to exactly one part."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from colocate._system.recent import Interval
from colocate.features.looking.idle import DRIVER, CallHistory, Slot, TimedCall

COMPUTE, COMMUNICATION, OTHERS, DRIVERS, MEMORY = "compute", "communication", "for others", "for the driver", "memory"
LAST = "(after the last call)"


@attrs.frozen
class Piece:
    """An interval in which a slot's call did nothing but communicate.

    Attributes:
        start: The start, in seconds of the driver's clock.
        end: The end.
        met_at: The arrival of the last participant, until which the slot waited for other slots.
    """

    start: float
    end: float
    met_at: float


@attrs.define
class Part:
    """The time that all slots spent on one method of one role.

    Attributes:
        calls: The number of calls, on all slots.
        seconds: The seconds of all slots, by kind of work or wait.
    """

    calls: int = 0
    seconds: dict[str, float] = attrs.field(factory=dict)

    def add_seconds(self, what: str, seconds: float) -> None:
        """Add seconds to one kind of work or wait."""
        if seconds > 0:
            self.seconds[what] = self.seconds.get(what, 0.0) + seconds


def split_time(known: CallHistory, pieces: Mapping[Slot, Sequence[Piece]], window: Interval) -> dict[str, Part]:
    """Split the time of slots by called method, and return the parts in the order of the first calls.

    Within a call a slot computes, communicates, waits for other participants, or moves memory. If calls overlap on a
    slot, the one that began last gets the time. Between calls, the slot waits for the driver or for
    something that the driver waits for; this time belongs to the next call.

    Args:
        known: All calls and moves, also those of other slots, in seconds of the driver's clock.
        pieces: The slots, each with its intervals of communication, in order.
        window: The interval to split.
    """
    parts: dict[str, Part] = {}
    for slot, slot_pieces in pieces.items():
        slot_calls = known.slot_calls(slot)
        for (start, end), call in slot_calls:
            part = parts.setdefault(call.label, Part())
            part.calls += int(end > window[0] and start < window[1])
        for label, kind, seconds in _time_in_calls(slot_calls, known.memory_moves(slot, window), slot_pieces, window):
            parts[label].add_seconds(kind, seconds)
        for then, why, seconds in known.idle_gaps(slot, window):
            part = parts.setdefault(LAST if then is None else then.label, Part())
            part.add_seconds(DRIVERS if why == DRIVER else OTHERS, seconds)
        for label, seconds in _time_between_calls(slot_calls, known.memory_moves(slot, window), window):
            parts.setdefault(label, Part()).add_seconds(MEMORY, seconds)
    if LAST in parts:
        parts[LAST] = parts.pop(LAST)
    return {label: part for label, part in parts.items() if part.seconds}


def _time_in_calls(
    own: Sequence[tuple[Interval, TimedCall]], moving: Sequence[Interval], pieces: Sequence[Piece], window: Interval
) -> Iterator[tuple[str, str, float]]:
    """Yield a tuple for each activity of a slot within calls: the call's label, the kind, and the seconds."""
    moments = sorted(
        {
            *(min(max(item, window[0]), window[1]) for interval, _ in own for item in interval),
            *(item for interval in moving for item in interval),
            *(moment for item in pieces for moment in (item.start, item.met_at, item.end)),
        }
    )
    calls = _SpanCursor((start, end, call.label) for (start, end), call in own)
    moves, exchanges = (
        _SpanCursor((*item, True) for item in moving),
        _SpanCursor((p.start, p.end, p.met_at) for p in pieces),
    )
    for start, end in pairwise(moments):
        label, moves_now, met = calls.value_at(start), moves.value_at(start), exchanges.value_at(start)
        if label is not None and window[0] <= start and end <= window[1]:
            kind = COMPUTE if met is None else COMMUNICATION if start >= met else OTHERS
            yield label, MEMORY if moves_now else kind, end - start


def _time_between_calls(
    own: Sequence[tuple[Interval, TimedCall]], moving: Sequence[Interval], window: Interval
) -> Iterator[tuple[str, float]]:
    """Yield the next call's label, and the seconds for which memory moved before this call."""
    last = window[0]
    for (start, end), call in [*own, ((window[1], window[1]), None)]:
        for first, then in moving:
            if (seconds := min(then, start) - max(first, last)) > 0:
                yield LAST if call is None else call.label, seconds
        last = max(last, end)


class _SpanCursor:
    """A sweep over time spans that finds, for increasing moments, the running span that began last."""

    def __init__(self, spans: Iterable[tuple[float, float, Any]]) -> None:
        self._upcoming = sorted(spans, key=lambda each: each[0], reverse=True)
        self._current: list[tuple[float, int, float, Any]] = []
        self._count = 0

    def value_at(self, moment: float) -> Any:
        """Return the value of the span at a moment, or None. Moments must not decrease."""
        while self._upcoming and self._upcoming[-1][0] <= moment:
            start, end, value = self._upcoming.pop()
            self._count += 1
            heapq.heappush(self._current, (-start, -self._count, end, value))
        while self._current and self._current[0][2] <= moment:
            heapq.heappop(self._current)
        return self._current[0][3] if self._current else None


def format_rows(found: Mapping[str, Part], slots: int) -> list[dict[str, str | float]]:
    """Return a table of the average seconds per slot, with one row for each method and a row of sums."""
    columns = [
        (COMPUTE, "compute (s)"),
        (COMMUNICATION, "communication (s)"),
        (OTHERS, "waits for others (s)"),
        (DRIVERS, "waits for the driver (s)"),
        (MEMORY, "memory moves (s)"),
    ]
    used = [
        (kind, title) for kind, title in columns if kind != MEMORY or any(MEMORY in e.seconds for e in found.values())
    ]
    whole = Part(sum(counted_part.calls for counted_part in found.values()))
    for counted_part in found.values():
        for kind, seconds in counted_part.seconds.items():
            whole.add_seconds(kind, seconds)
    return [
        {
            "call": label,
            "calls": part.calls,
            "time (s)": round(sum(part.seconds.values()) / slots, 6),
            **{title: round(part.seconds.get(kind, 0.0) / slots, 6) for kind, title in used},
        }
        for label, part in [*found.items(), ("all", whole)]
    ]
