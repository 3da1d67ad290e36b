"""One round of calls up close: what a job does again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise
from statistics import median_low
from typing import TYPE_CHECKING

import attrs

from colocate_report.lanes import name_of
from colocate_report.scale import duration, percent, time_ticks

if TYPE_CHECKING:
    from colocate_report.calls import Span

MAX_BARS = 1500
MAX_LANES = 12
SAMPLED = 50  # rounds of each method that are looked at
Spans = Sequence["Span"]


@attrs.frozen
class Bar:
    """One call of one rank: left edge and width in %, row in its lane, the role's number, name and text."""

    left: float
    width: float
    row: int
    role: int
    name: str
    text: str


@attrs.frozen
class Closeup:
    """One round of calls as it was."""

    lanes: tuple[tuple[str, int, tuple[Bar, ...]], ...]  # A slot's label, how many rows it has, its bars
    ticks: tuple[tuple[float, str], ...]  # places in % and labels of the time axis, from the round's start
    begins: str  # when it began, as text
    lasted: str  # how long it was, as text
    anchor: str  # the call that begins each round


def closeup(lanes: Mapping[str, Spans], roles: Mapping[str, int], start: float) -> Closeup | None:
    """A round of the first slot, and what the next ones did at that time; None when nothing repeats."""
    lanes = dict(islice(lanes.items(), MAX_LANES))
    found = _round(next(iter(lanes.values()), ()))
    if found is None:
        return None
    anchor, begin, end = found
    drawn = []
    for label, spans in lanes.items():
        inside = [span for span in spans if span.start < end and span.end > begin][: MAX_BARS // len(lanes)]
        rows = _rows(inside)
        bars = (_bar(span, row, roles, begin, end) for span, row in zip(inside, rows, strict=True))
        drawn.append((label, max(rows, default=0) + 1, tuple(bars)))
    return Closeup(tuple(drawn), time_ticks(end - begin, 8), duration(begin - start), duration(end - begin), anchor)


def _round(spans: Spans) -> tuple[str, float, float] | None:
    """One of the rounds that a job goes through, the median: the call that begins it, its start and end.

    A round is what lies between two calls of the same method. The best to look at is the one with the most methods that
    are called just once: too short a round has few, and one that is many shorter ones calls everything often.
    """
    names = [name_of(span) for span in spans]
    places: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    best: tuple[int, float] | None = None
    found: tuple[str, float, float] | None = None
    for name, each in places.items():
        if len(each) < 3:
            continue
        once, first, after = _typical(spans, names, each)
        # Of the calls of one round the first is the one before which the slot waits longest: for the driver's own work.
        rank = once, sum(max(0.0, spans[place].start - spans[place - 1].end) for place in each if place > 0)
        if spans[after].start > spans[first].start and (best is None or rank > best):
            best, found = rank, (name, spans[first].start, spans[after].start)
    return found


def _typical(spans: Spans, names: Sequence[str], places: Sequence[int]) -> tuple[int, int, int]:
    """How many methods a round between these calls usually calls just once, and one of median length where it is so."""
    rounds = list(pairwise(places))
    rounds = rounds[:: -(-len(rounds) // SAMPLED)]
    once = [sum(count == 1 for count in Counter(names[first:after]).values()) for first, after in rounds]
    usual = median_low(once)
    alike = [each for each, count in zip(rounds, once, strict=True) if count == usual]
    return usual, *sorted(alike, key=lambda each: spans[each[1]].start - spans[each[0]].start)[(len(alike) - 1) // 2]


def _rows(spans: Iterable[Span]) -> list[int]:
    """A row for each span so that those which overlap lie in different ones."""
    free: list[float] = []
    rows = []
    for span in spans:
        row = next((row for row, until in enumerate(free) if until <= span.start), len(free))
        free[row : row + 1] = [span.end]
        rows.append(row)
    return rows


def _bar(span: Span, row: int, roles: Mapping[str, int], begin: float, end: float) -> Bar:
    left = max(0.0, (span.start - begin) / (end - begin))
    right = min(1.0, (span.end - begin) / (end - begin))
    name = f"{name_of(span)}: {span.why}" if span.why else name_of(span)
    text = f"{name}\n{duration(span.end - span.start)}, after {duration(max(0.0, span.start - begin))}"
    return Bar(percent(left), percent(right - left), row, roles[span.role], span.method, text)
