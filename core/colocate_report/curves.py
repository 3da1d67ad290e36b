"""The learning curves: what a run logged, as lines over its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs

from colocate.texts import plural
from colocate_report.scale import Axis, number, percent, words

WIDTH, HEIGHT = 2000, 1000  # units of a plot; the page stretches it
LARGE_LINES = 4
SMALL_CHARTS = 24
DOTTED = 40  # lines of up to so many points show each of them

Point = tuple[int, float | None]


@attrs.frozen(eq=False)
class Series:
    """One metric."""

    name: str  # what the job calls it
    points: Sequence[Point]  # A step and its value for each time it was logged; None where that was no finite number
    values: Sequence[float]  # the finite values in order; there may be none

    @property
    def label(self) -> str:
        """The series' name for people."""
        return words(self.name)

    @property
    def last(self) -> str:
        """Return what it was in the end, as text."""
        return number(self.values[-1]) if self.points[-1][1] is not None else "not finite"

    @property
    def gap(self) -> str:
        """In words, when it was no finite number; empty when it always was."""
        steps = [step for step, value in self.points if value is None]
        if not steps:
            return ""
        if not self.values:
            return f"{self.label} never was a finite number."
        much, whole = f"{len(steps):,}", plural(len(self.points), "time")
        return f"{self.label} was no finite number {much} of {whole}, first at step {steps[0]:,}."


@attrs.frozen
class Line:
    """A series as drawn."""

    label: str  # what it shows
    path: str  # its line, an SVG path; of many points their mean
    band: str  # between the lowest and highest of many points, an SVG path; empty when the line shows all
    dots: str  # its points as zero-length strokes, an SVG path; empty when they are too many
    first: str  # its first value, as text
    last: str  # its last value, as text
    strong: bool  # whether it is a result on held-out data, drawn bolder


@attrs.frozen
class Chart:
    """A plot."""

    title: str  # what it shows
    lines: tuple[Line, ...]  # what is drawn
    x_ticks: tuple[tuple[float, str], ...]  # steps: place in %, label
    y_ticks: tuple[tuple[float, str], ...]  # values: place in % from the top, label
    summary: str  # the plot in words, for those who don't see it


@attrs.frozen
class Curves:
    """All charts of a run."""

    large: tuple[Chart, ...]  # the important ones
    small: tuple[Chart, ...]  # the others
    rest: tuple[tuple[str, ...], ...]  # what found no room: name, first, last, lowest, highest
    gaps: tuple[str, ...]  # what wasn't always a finite number, in words

    @property
    def banded(self) -> bool:
        """Whether any line shows a mean."""
        return any(line.band for chart in (*self.large, *self.small) for line in chart.lines)


def series_of(rows: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Return what the rows have, in the order in which names came up."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time") and (value is None or isinstance(value, bool | int | float)):
                finite = None if value is None or not math.isfinite(value) else float(value)
                found.setdefault(name, []).append((int(row["step"]), finite))
    series = []
    for name, points in found.items():
        points.sort(key=lambda point: point[0])
        series.append(Series(name, points, [value for _, value in points if value is not None]))
    return series


def headline(series: Sequence[Series]) -> list[Series]:
    """The series that say whether a run has learned: held-out results, then rewards, then other successes."""
    drawn = [each for each in series if each.values]
    ranked = sorted((each for each in drawn if rank_metric(each.name) < 9), key=lambda each: rank_metric(each.name))
    return ranked[:LARGE_LINES] or drawn[:1]


def curves(series: Sequence[Series]) -> Curves:
    """The charts of what a run logged."""
    leading = headline(series)
    others = [each for each in series if each.values and each not in leading]
    shown, rest = others[:SMALL_CHARTS], others[SMALL_CHARTS:]
    # Values between 0 and 1 share an axis: comparing them is the point. Others would flatten each other.
    fractions = [each for each in leading if min(each.values) >= 0 and max(each.values) <= 1]
    large = [fractions] if fractions else []
    large += [[each] for each in leading if each not in fractions]
    steps = [each.points[place][0] for each in series for place in (0, -1)]
    span = (min(steps), max(steps)) if steps else (0, 0)
    return Curves(
        tuple(_chart(group, span, large=True) for group in large),
        tuple(_chart([each], span, large=False) for each in shown),
        tuple(
            (each.label, number(each.values[0]), each.last, number(min(each.values)), number(max(each.values)))
            for each in rest[:200]
        ),
        tuple(each.gap for each in series if each.gap)[:SMALL_CHARTS],
    )


def rank_metric(name: str) -> int:
    """Rank a metric by name, from 0 (tells most of a run: a held-out accuracy) to 9 (tells least)."""
    parts = set(name.lower().replace("/", "_").split("_"))
    held_out = bool(parts & {"eval", "val", "validation", "test"})
    if parts & {"accuracy", "success", "acc"}:
        return 0 if held_out else 3
    if parts & {"reward", "return", "score"}:
        return 1 if held_out else 2
    return 4 if held_out else 9


def _chart(group: Sequence[Series], span: tuple[int, int], *, large: bool) -> Chart:
    values = [value for each in group for value in each.values]
    low, high = min(values), max(values)
    if 0 <= low < high / 2:
        low = 0.0  # near enough to show it, and slopes then tell the truth
    if large and len(group) > 1 and high > 0.6:
        high = 1.0
    x = Axis.within(*span, 8 if large else 4, whole=True)
    y = Axis.around(low, high, 5 if large else 3)
    lines = tuple(_line(each, x, y, 300 if large else 120) for each in group)
    said = [f"{line.label} from {line.first} to {line.last}" for line in lines]
    return Chart(
        title=", ".join(line.label for line in lines),
        lines=lines,
        x_ticks=tuple((percent(x.at(tick)), label) for tick, label in zip(x.ticks, x.labels(), strict=True)),
        y_ticks=tuple((percent(1 - y.at(tick)), label) for tick, label in zip(y.ticks, y.labels(), strict=True)),
        summary=f"Steps {span[0]} to {span[1]}: {'; '.join(said)}.",
    )


def _line(series: Series, x: Axis, y: Axis, columns: int) -> Line:
    def place(step: float, value: float) -> tuple[int, int]:
        return round(x.at(step) * WIDTH), round((1 - y.at(value)) * HEIGHT)

    band = ""
    points: Sequence[tuple[float, float | None]] = series.points
    if len(points) > 2 * columns:
        buckets = _buckets(series.points, x, columns)
        points = [(step, mean) for step, mean, _, _ in buckets]
        upper = [place(step, high) for step, _, _, high in buckets]
        lower = [place(step, low) for step, _, low, _ in reversed(buckets)]
        band = _path([*upper, *lower]) + "z"
    places = [None if value is None else place(step, value) for step, value in points]
    real = [each for each in places if each is not None]
    return Line(
        label=series.label,
        path=_path(places),
        band=band,
        dots="".join(f"M{left} {top}h0" for left, top in real) if len(real) <= DOTTED else "",
        first=number(series.values[0]),
        last=series.last,
        strong=rank_metric(series.name) in (0, 1, 4),
    )


def _path(places: Sequence[tuple[int, int] | None]) -> str:
    """A line through the places, broken where there is none."""
    text, pen = [], "M"
    for place in places:
        if place is None:
            pen = "M"
        else:
            text.append(f"{pen}{place[0]} {place[1]}")
            pen = "L"
    return "".join(text)


def _buckets(points: Sequence[Point], x: Axis, columns: int) -> list[tuple[float, float, float, float]]:
    """For each column that has finite values: the middle of their steps, their mean, lowest and highest."""
    buckets: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        if value is not None:
            buckets.setdefault(min(columns - 1, int(x.at(step) * columns)), []).append((step, value))
    found = []
    for bucket in buckets.values():
        values = [value for _, value in bucket]
        found.append(((bucket[0][0] + bucket[-1][0]) / 2, fmean(values), min(values), max(values)))
    return found
