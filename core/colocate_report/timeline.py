"""Draw a run's timeline, with a lane for each slot that shows the running roles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from colocate_report.scale import format_percent, make_time_ticks

if TYPE_CHECKING:
    from colocate_report.calls import Restart, Span

LEVELS = 100  # The height of a lane in SVG units. A slot that is always busy fills the height.


@attrs.frozen
class Mark:
    """A time span without workers: left edge and width in %, and a text."""

    left: float
    width: float
    text: str


@attrs.frozen
class Lane:
    """The lane of one slot over the whole run."""

    label: str
    # The number and the SVG area of each colour; the largest area comes first, so that later areas are drawn on top.
    areas: tuple[tuple[int, str], ...]
    busy: str  # The busy share of the time, as text.
    marks: tuple[Mark, ...] = ()  # The times without the slot's worker.


@attrs.frozen
class Grid:
    """A time span that is divided into equal columns."""

    start: float
    end: float
    columns: int

    @property
    def unit(self) -> float:
        """The seconds of one column."""
        return ((self.end - self.start) or 1.0) / self.columns

    def column_of(self, moment: float) -> int:
        """Return the number of the column that contains a time."""
        return max(0, min(self.columns - 1, int((moment - self.start) / self.unit)))

    def spread_span(self, span: Span) -> Iterator[tuple[int, float]]:
        """Yield the columns that a span touches, with the span's seconds in each column."""
        for column in range(self.column_of(span.start), self.column_of(span.end) + 1):
            low = self.start + column * self.unit
            if (seconds := min(span.end, low + self.unit) - max(span.start, low)) > 0:
                yield column, seconds


def make_lane(
    label: str, spans: Sequence[Span], roles: Mapping[str, int], grid: Grid, marks: Sequence[Mark] = ()
) -> Lane:
    """Draw the lane of a slot as SVG areas."""
    busy: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(grid.columns)]
    for span in spans:
        for column, seconds in grid.spread_span(span):
            busy[column][roles[span.role]] += seconds
    colours = sorted(set().union(*busy))
    heights = [_stack_heights(counts, colours, grid.unit) for counts in busy]
    areas = [(colour, _area_path([height[place] for height in heights])) for place, colour in enumerate(colours)]
    total = sum(min(1.0, sum(counts.values()) / grid.unit) for counts in busy)
    return Lane(label, tuple(reversed(areas)), f"{total / grid.columns:.0%}", tuple(marks))


def _stack_heights(counts: Mapping[int, float], colours: Sequence[int], unit: float) -> list[int]:
    """Return the stack's height after each added colour. Overlapping calls fill at most the full height."""
    full = max(unit, sum(counts.values()))
    height, heights = 0.0, []
    for colour in colours:
        height += counts.get(colour, 0.0)
        heights.append(round(LEVELS * height / full))
    return heights


def _area_path(heights: Sequence[int]) -> str:
    """Return the SVG path of the area below columns of the given heights."""
    text, level = [f"M0 {LEVELS}"], 0
    for column, height in enumerate(heights):
        if height != level:
            text.append(f"H{column}V{LEVELS - height}")
            level = height
    return "".join([*text, f"H{len(heights)}V{LEVELS}z"])


MAX_LANES = 48
AREAS = 40_000  # The most columns of all lanes and colours together.


@attrs.frozen
class Timeline:
    """The timeline of a run."""

    lanes: tuple[Lane, ...]
    hidden: int  # The number of slots without a lane.
    columns: int  # The width of a lane in SVG units.
    ticks: tuple[tuple[float, str], ...]  # The place in % and the label of each tick on the time axis.


def make_timeline(
    spans: Sequence[Span], roles: Mapping[str, int], start: float, end: float, restarts: Sequence[Restart] = ()
) -> Timeline:
    """Lay out the timeline of a run."""
    slots: dict[tuple[str, int], list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        slots.setdefault((span.group, span.slot), []).append(span)
    start = min([start, *(stretch[0].start for stretch in slots.values())])
    end = max([end, *(span.end for span in spans)])
    ordered = sorted(slots)
    shown = ordered[:MAX_LANES]
    several = len({group for group, _ in ordered}) > 1
    labels = {slot: f"{slot[0]} {slot[1]}" if several else f"slot {slot[1]}" for slot in shown}
    count = max(1, len(shown))
    grid = Grid(start, end, max(80, min(480, AREAS // (count * max(1, len(set(roles.values())))))))
    marks: defaultdict[str, list[Mark]] = defaultdict(list)
    whole = (end - start) or 1.0
    for restart in restarts:
        if restart.ready > start:
            left_edge, right = max(0.0, (restart.at - start) / whole), min(1.0, (restart.ready - start) / whole)
            text = f"{restart.what}\n{restart.lost:.0f} s lost"
            marks[restart.group].append(Mark(format_percent(left_edge), format_percent(right - left_edge), text))
    return Timeline(
        lanes=tuple(make_lane(labels[slot], slots[slot], roles, grid, marks[slot[0]]) for slot in shown),
        hidden=len(ordered) - len(shown),
        columns=grid.columns,
        ticks=make_time_ticks(end - start, 10),
    )
