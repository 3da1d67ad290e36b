"""Intervals of time, and which part of the last seconds something was busy."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

Interval: TypeAlias = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time in intervals that don't overlap, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return how long they are together; what is in several of them counts once."""
    return sum(end - start for start, end in merged(intervals))


def without(some: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return what of some intervals is in none of the others, which are merged."""
    found: list[Interval] = []
    for start, end in some:
        place = max(0, bisect_right(others, (start, start)) - 1)
        while place < len(others) and others[place][0] < end:
            first, last = others[place]
            if first > start:
                found.append((start, first))
            start, place = max(start, last), place + 1
        if start < end:
            found.append((start, end))
    return found


RECENT_S = 10.0
"""Of so much time the busy share is told."""
_MOST = 20_000

Key = TypeVar("Key", bound=Hashable)


class RecentSpans(Generic[Key]):
    """Spans of the last seconds, by whose they are. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: deque[tuple[Key, float, float]] = deque(maxlen=_MOST)
        self._ends: dict[Key, float] = {}

    def add(self, key: Key, start: float, end: float) -> None:
        """Note a span that has ended; both in seconds of time.time()."""
        with self._lock:
            self._spans.append((key, start, end))
            self._ends[key] = max(end, self._ends.get(key, end))

    def ends(self) -> dict[Key, float]:
        """Return when the last one ended, however long ago, by whose it was."""
        with self._lock:
            return dict(self._ends)

    def shares(self, now: float, more: Iterable[tuple[Key, float, float]] = ()) -> dict[Key, float]:
        """Return the part of the last seconds that was spent, by whose it was; what overlaps counts once."""
        since = now - RECENT_S
        found: dict[Key, list[Interval]] = {}
        with self._lock:
            while self._spans and self._spans[0][2] < since:
                self._spans.popleft()
            spans = [*self._spans, *(span for span in more if span[2] > since)]
        for key, start, end in spans:
            found.setdefault(key, []).append((max(start, since), end))
        return {key: length(each) / RECENT_S for key, each in found.items()}
