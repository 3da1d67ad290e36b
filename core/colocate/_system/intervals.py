"""Intervals of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that don't overlap, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """How long they are together; what is in several of them counts once."""
    return sum(end - start for start, end in merged(intervals))
