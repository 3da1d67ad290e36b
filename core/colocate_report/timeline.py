"""The timeline: a lane for each slot with what ran there, whole and from near by."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from statistics import median_low
from typing import TYPE_CHECKING

import attrs

from colocate_report.curves import Hover
from colocate_report.scale import duration, offset, percent, time_ticks

if TYPE_CHECKING:
    from colocate_report.calls import Restart, Span

LEVELS = 100  # a lane's height in its own units: all of it means busy all the time
NAMED = 6  # methods that one place names to a pointer


@attrs.frozen
class Mark:
    """A time without workers: left edge and width in %, and text."""

    left: float
    width: float
    text: str


@attrs.frozen
class Lane:
    """One slot over the whole run."""

    label: str  # the slot
    # for each colour its number and the area that it and the colours under it fill, an SVG path; the largest
    # first, so that the later ones are drawn over it
    areas: tuple[tuple[int, str], ...]
    hovers: tuple[Hover, ...]  # what a pointer is shown
    busy: str  # the busy part of the time, as text
    marks: tuple[Mark, ...] = ()  # when the slot's worker was lost, until it was back


@attrs.frozen
class Grid:
    """A time span in equal columns."""

    start: float
    end: float
    columns: int

    @property
    def unit(self) -> float:
        """Seconds of a column."""
        return ((self.end - self.start) or 1.0) / self.columns

    def column(self, moment: float) -> int:
        """The column of a moment."""
        return max(0, min(self.columns - 1, int((moment - self.start) / self.unit)))

    def spread(self, span: Span) -> Iterator[tuple[int, float]]:
        """How many seconds of a span lie in each of the columns that it touches."""
        for column in range(self.column(span.start), self.column(span.end) + 1):
            low = self.start + column * self.unit
            if (seconds := min(span.end, low + self.unit) - max(span.start, low)) > 0:
                yield column, seconds


def lane(label: str, spans: Sequence[Span], roles: Mapping[str, int], grid: Grid, strips: int) -> Lane:
    """Draw a slot."""
    busy: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(grid.columns)]
    for span in spans:
        for column, seconds in grid.spread(span):
            busy[column][roles[span.role]] += seconds
    colours = sorted(set().union(*busy))
    heights = [_heights(counts, colours, grid.unit) for counts in busy]
    areas = [(colour, _area([each[place] for each in heights])) for place, colour in enumerate(colours)]
    total = sum(min(1.0, sum(counts.values()) / grid.unit) for counts in busy)
    told = attrs.evolve(grid, columns=strips)
    return Lane(label, tuple(reversed(areas)), tuple(_hovers(spans, told)), f"{total / grid.columns:.0%}")


def name_of(span: Span) -> str:
    """Return what a call is called: role.method."""
    return f"{span.role}.{span.method}" if span.role else span.method


def _heights(counts: Mapping[int, float], colours: Sequence[int], unit: float) -> list[int]:
    """How high the stack is after each of the colours. Calls that overlap don't make it higher than full."""
    full = max(unit, sum(counts.values()))
    height, heights = 0.0, []
    for colour in colours:
        height += counts.get(colour, 0.0)
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


def _hovers(spans: Sequence[Span], grid: Grid) -> Iterator[Hover]:
    begun: list[Counter[str]] = [Counter() for _ in range(grid.columns)]
    spent: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(grid.columns)]
    for span in spans:
        name = name_of(span)
        begun[grid.column(span.start)][name] += 1
        for strip, seconds in grid.spread(span):
            spent[strip][name] += seconds
    longest = grid.end - grid.start
    for strip, counts in enumerate(spent):
        if not counts:
            continue
        lines = [f"{offset(strip * grid.unit, longest)} to {offset((strip + 1) * grid.unit, longest)}"]
        for name, seconds in sorted(counts.items(), key=lambda each: -each[1])[:NAMED]:
            calls = f" ({begun[strip][name]} calls)" if begun[strip][name] > 1 else ""
            lines.append(f"{name} {duration(seconds)}{calls}")
        if len(counts) > NAMED:
            lines.append(f"and {len(counts) - NAMED} more")
        yield Hover(percent(strip / grid.columns), percent(1 / grid.columns), "\n".join(lines))


MAX_BARS = 1500
NEAR_LANES = 12
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
    lanes = dict(islice(lanes.items(), NEAR_LANES))
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
    """Return a round of a job, the median: the call that begins it, its start and end.

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


MAX_LANES = 48
AREAS = 40_000  # columns of all lanes and colours together
STRIPS = 1200  # places of all lanes together that say something to a pointer


@attrs.frozen
class Timeline:
    """All lanes of a run."""

    lanes: tuple[Lane, ...]  # one per slot
    hidden: int  # how many more slots there are
    columns: int  # how wide a lane is in its own units
    ticks: tuple[tuple[float, str], ...]  # places in % and labels of the time axis
    closeup: Closeup | None  # one round up close; None when nothing repeats


def timeline(
    spans: Sequence[Span], roles: Mapping[str, int], start: float, end: float, restarts: Sequence[Restart] = ()
) -> Timeline:
    """The lanes of a run."""
    slots: dict[tuple[str, int], list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        slots.setdefault((span.group, span.slot), []).append(span)
    start = min([start, *(found[0].start for found in slots.values())])
    end = max([end, *(span.end for span in spans)])
    ordered = sorted(slots)
    shown = ordered[:MAX_LANES]
    several = len({group for group, _ in ordered}) > 1
    labels = {slot: f"{slot[0]} {slot[1]}" if several else f"slot {slot[1]}" for slot in shown}
    count = max(1, len(shown))
    grid = Grid(start, end, max(80, min(480, AREAS // (count * max(1, len(set(roles.values())))))))
    strips = max(20, min(120, STRIPS // count))
    marks: defaultdict[str, list[Mark]] = defaultdict(list)
    whole = (end - start) or 1.0
    for each in restarts:
        if each.ready > start:
            left, right = max(0.0, (each.at - start) / whole), min(1.0, (each.ready - start) / whole)
            text = f"{each.what}\n{each.lost:.0f} s lost"
            marks[each.group].append(Mark(percent(left), percent(right - left), text))
    return Timeline(
        lanes=tuple(
            attrs.evolve(
                lane(labels[slot], slots[slot], roles, grid, strips),
                marks=tuple(marks[slot[0]]),
            )
            for slot in shown
        ),
        hidden=len(ordered) - len(shown),
        columns=grid.columns,
        ticks=time_ticks(end - start, 10),
        closeup=closeup({labels[slot]: slots[slot] for slot in shown}, roles, start),
    )
