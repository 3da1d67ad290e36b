"""Merge time intervals, and compute the busy share of the last seconds."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

Interval: TypeAlias = tuple[float, float]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals; return disjoint intervals in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        elif end > start:
            result.append((start, end))
    return result


def measure_length(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals; overlaps count once."""
    return sum(end - start for start, end in merge_intervals(intervals))


def subtract_intervals(some: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the intervals `some` that lie outside of `others`, which must be disjoint and in order."""
    result: list[Interval] = []
    for start, end in some:
        place = max(0, bisect_right(others, (start, start)) - 1)
        while place < len(others) and others[place][0] < end:
            first, last = others[place]
            if first > start:
                result.append((start, first))
            start, place = max(start, last), place + 1
        if start < end:
            result.append((start, end))
    return result


RECENT_S = 10.0
"""Seconds over which a busy share is computed."""
_MOST = 20_000

Key = TypeVar("Key", bound=Hashable)


class RecentSpans(Generic[Key]):
    """A record of the time spans of the last seconds, by key. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: deque[tuple[Key, float, float]] = deque(maxlen=_MOST)
        self._ends: dict[Key, float] = {}

    def add_span(self, key: Key, start: float, end: float) -> None:
        """Add a finished span, in seconds of time.time()."""
        with self._lock:
            self._spans.append((key, start, end))
            self._ends[key] = max(end, self._ends.get(key, end))

    def get_ends(self) -> dict[Key, float]:
        """Return the end of the last span of each key, however long ago."""
        with self._lock:
            return dict(self._ends)

    def get_shares(self, now: float, more: Iterable[tuple[Key, float, float]] = ()) -> dict[Key, float]:
        """Return the busy share of the last seconds, by key; overlaps count once."""
        since = now - RECENT_S
        intervals: dict[Key, list[Interval]] = {}
        with self._lock:
            while self._spans and self._spans[0][2] < since:
                self._spans.popleft()
            spans = [*self._spans, *(span for span in more if span[2] > since)]
        for key, start, end in spans:
            intervals.setdefault(key, []).append((max(start, since), end))
        return {key: measure_length(busy) / RECENT_S for key, busy in intervals.items()}
