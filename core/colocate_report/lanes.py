"""One slot over the whole run, drawn at the resolution that a page has, however many calls there were."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from colocate_report.curves import Hover
from colocate_report.scale import duration, offset, percent

if TYPE_CHECKING:
    from colocate_report.calls import Span

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
    """What a call is called: role.method."""
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
