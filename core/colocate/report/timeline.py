"""When each slot was busy for which role: the whole run, and one round of it up close."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING

import attrs

from colocate.report.curves import Hover
from colocate.report.scale import duration, offset, percent, time_ticks

if TYPE_CHECKING:
    from colocate._calls import Span

LEVELS = 100  # a lane's height in its own units: all of it means busy all the time
MAX_LANES = 48
MAX_BARS = 1500
SAMPLED = 50  # rounds of each method that are looked at
Slot = tuple[str, int]
Spans = Sequence["Span"]


@attrs.frozen
class Lane:
    """One slot over the whole run.

    Attributes:
        label: The slot.
        areas: For each role its number and the area that it and the roles under it fill, an SVG path; the largest
            first, so that the later ones are drawn over it.
        hovers: What a pointer is shown.
        busy: The busy part of the time, as text.
    """

    label: str
    areas: tuple[tuple[int, str], ...]
    hovers: tuple[Hover, ...]
    busy: str


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
    """One round of calls as it was.

    Attributes:
        lanes: A slot's label, how many rows it has, its bars.
        ticks: Places in % and labels of the time axis, from the round's start.
        begins: When it began, as text.
        lasted: How long it was, as text.
        anchor: The call that begins each round.
    """

    lanes: tuple[tuple[str, int, tuple[Bar, ...]], ...]
    ticks: tuple[tuple[float, str], ...]
    begins: str
    lasted: str
    anchor: str


@attrs.frozen
class Timeline:
    """All lanes of a run.

    Attributes:
        lanes: One per slot.
        hidden: How many more slots there are.
        columns: How wide a lane is in its own units.
        ticks: Places in % and labels of the time axis.
        closeup: One round up close; None when nothing repeats.
    """

    lanes: tuple[Lane, ...]
    hidden: int
    columns: int
    ticks: tuple[tuple[float, str], ...]
    closeup: Closeup | None


def timeline(spans: Spans, roles: Mapping[str, int], start: float, end: float) -> Timeline:
    """The lanes of a run.

    Args:
        spans: When each rank was busy.
        roles: The roles' numbers.
        start: When the run, or what is known of it, began.
        end: When it ended.
    """
    slots: dict[Slot, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        slots.setdefault((span.group, span.slot), []).append(span)
    start = min([start, *(found[0].start for found in slots.values())])
    end = max([end, *(span.end for span in spans)])
    ordered = sorted(slots)
    shown = ordered[:MAX_LANES]
    several = len({group for group, _ in ordered}) > 1
    labels = {slot: f"{slot[0]} {slot[1]}" if several else f"slot {slot[1]}" for slot in shown}
    columns = max(160, min(480, 9600 // max(1, len(shown))))
    return Timeline(
        lanes=tuple(_lane(labels[slot], slots[slot], roles, start, end, columns) for slot in shown),
        hidden=len(ordered) - len(shown),
        columns=columns,
        ticks=time_ticks(end - start, 10),
        closeup=_closeup({labels[slot]: slots[slot] for slot in shown}, roles, start),
    )


# -- the whole run


def _lane(label: str, spans: Spans, roles: Mapping[str, int], start: float, end: float, columns: int) -> Lane:
    unit = ((end - start) or 1.0) / columns
    busy: list[Counter[int]] = [Counter() for _ in range(columns)]
    for span in spans:
        for column, seconds in _spread(span, start, unit, columns):
            busy[column][roles[span.role]] += seconds
    heights = [_heights(counts, unit, len(roles)) for counts in busy]
    used = [number for number in range(len(roles)) if any(number in counts for counts in busy)]
    areas = ((number, _area([each[number] for each in heights])) for number in reversed(used))
    total = sum(min(1.0, sum(counts.values()) / unit) for counts in busy)
    return Lane(label, tuple(areas), tuple(_hovers(spans, start, end, columns)), f"{total / columns:.0%}")


def _spread(span: Span, start: float, unit: float, columns: int) -> Iterator[tuple[int, float]]:
    """How long a span lasts in each of the columns that it touches."""
    first = min(columns - 1, int((span.start - start) / unit))
    last = min(columns - 1, int((span.end - start) / unit))
    for column in range(first, last + 1):
        low, high = start + column * unit, start + (column + 1) * unit
        if (seconds := min(span.end, high) - max(span.start, low)) > 0:
            yield column, seconds


def _heights(counts: Counter[int], unit: float, roles: int) -> list[int]:
    """How high the roles' stack is after each of them. Calls that overlap don't make it higher than full."""
    full = max(unit, sum(counts.values()))
    height, heights = 0.0, []
    for number in range(roles):
        height += counts[number]
        heights.append(round(LEVELS * height / full))
    return heights


def _area(heights: Sequence[int]) -> str:
    """The area under a staircase."""
    text, level = [f"M0 {LEVELS}"], 0
    for column, height in enumerate(heights):
        if height != level:
            text.append(f"H{column}V{LEVELS - height}")
            level = height
    return "".join([*text, f"H{len(heights)}V{LEVELS}z"])


def _hovers(spans: Spans, start: float, end: float, columns: int) -> Iterator[Hover]:
    strips = columns // 4
    unit = ((end - start) or 1.0) / strips
    counts: list[Counter[str]] = [Counter() for _ in range(strips)]
    seconds: list[Counter[str]] = [Counter() for _ in range(strips)]
    for span in spans:
        name = _name(span)
        counts[min(strips - 1, int((span.start - start) / unit))][name] += 1
        for strip, spent in _spread(span, start, unit, strips):
            seconds[strip][name] += spent
    for strip, spent in enumerate(seconds):
        if not spent:
            continue
        lines = [f"{offset(strip * unit, end - start)} – {offset((strip + 1) * unit, end - start)}"]
        for name, total in spent.most_common(6):
            begun = f" ({counts[strip][name]}×)" if counts[strip][name] > 1 else ""
            lines.append(f"{name} {duration(total)}{begun}")
        if len(spent) > 6:
            lines.append(f"and {len(spent) - 6} more")
        yield Hover(percent(strip / strips), percent(1 / strips), "\n".join(lines))


# -- one round


def _closeup(lanes: Mapping[str, Spans], roles: Mapping[str, int], start: float) -> Closeup | None:
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
    """One of the rounds that a job goes through, from the middle: the call that begins it, its start and end.

    A round is what lies between two calls of the same method. The best to look at is the one with the most methods that
    are called just once: too short a round has few, and one that is many shorter ones calls everything often.
    """
    names = [_name(span) for span in spans]
    places: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    best: tuple[int, float] | None = None
    found: tuple[str, float, float] | None = None
    for name, each in places.items():
        if len(each) < 3:
            continue
        once, first, after = _typical(names, each)
        # Of the calls of one round the first is the one before which the slot waits longest: for the driver's own work.
        rank = once, sum(max(0.0, spans[place].start - spans[place - 1].end) for place in each if place > 0)
        if spans[after].start > spans[first].start and (best is None or rank > best):
            best, found = rank, (name, spans[first].start, spans[after].start)
    return found


def _typical(names: Sequence[str], places: Sequence[int]) -> tuple[int, int, int]:
    """How many methods a round between these calls usually calls just once, and a middle one where it is so."""
    rounds = list(pairwise(places))
    rounds = rounds[:: -(-len(rounds) // SAMPLED)]
    once = [sum(count == 1 for count in Counter(names[first:after]).values()) for first, after in rounds]
    usual = median_low(once)
    alike = [each for each, count in zip(rounds, once, strict=True) if count == usual]
    return usual, *alike[len(alike) // 2]


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
    text = f"{_name(span)}\n{duration(span.end - span.start)}, after {duration(max(0.0, span.start - begin))}"
    return Bar(percent(left), percent(right - left), row, roles[span.role], span.method, text)


def _name(span: Span) -> str:
    return f"{span.role}.{span.method}" if span.role else span.method
