"""Draw the learning curves of a run, which show logged numbers over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs

from colocate.texts import format_count
from colocate_report.scale import Axis, format_number, format_percent, humanize

WIDTH, HEIGHT = 2000, 1000  # The size of a plot in SVG units, which the page scales.
LARGE_LINES = 4
SMALL_CHARTS = 24
DOTTED = 40  # A line with at most this many points shows dots.

Point = tuple[int, float | None]


@attrs.frozen(eq=False)
class Series:
    """The logged values of one metric."""

    name: str  # The metric's name in the job.
    points: Sequence[Point]  # Steps and values in order. NaN and infinities are None.
    values: Sequence[float]  # The finite values in order. The list may be empty.

    @property
    def label(self) -> str:
        """The metric's name in words."""
        return humanize(self.name)

    @property
    def last(self) -> str:
        """The last value, as text."""
        return format_number(self.values[-1]) if self.points[-1][1] is not None else "not finite"

    @property
    def gap(self) -> str:
        """A sentence about values that weren't finite; empty if all values were finite."""
        steps = [step for step, value in self.points if value is None]
        if not steps:
            return ""
        if not self.values:
            return f"{self.label} never was a finite number."
        much, whole = f"{len(steps):,}", format_count(len(self.points), "time")
        return f"{self.label} was no finite number {much} of {whole}, first at step {steps[0]:,}."


@attrs.frozen
class Line:
    """A line of a chart, as SVG paths."""

    label: str  # The metric's name in words.
    path: str  # The SVG path of the line, or of mean values if there are many points.
    band: str  # The SVG path of the area between lowest and highest points; empty if the line has all points.
    dots: str  # The SVG path of dots at the points; empty for many points.
    first: str
    last: str
    strong: bool  # Whether to draw a bold line, for a held-out result.


@attrs.frozen
class Chart:
    """A chart of metrics over steps."""

    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]  # The place in % and the label of each tick for steps.
    y_ticks: tuple[tuple[float, str], ...]  # The place in % from the top and the label of each tick for values.
    summary: str  # A description of the chart in words, for blind readers.


@attrs.frozen
class Curves:
    """All charts of a run."""

    large: tuple[Chart, ...]
    small: tuple[Chart, ...]
    rest: tuple[tuple[str, ...], ...]  # Metrics without a chart: name, and first, last, lowest and highest value.
    gaps: tuple[str, ...]  # Sentences about values that weren't finite.

    @property
    def banded(self) -> bool:
        """Whether any line shows mean values."""
        return any(line.band for chart in (*self.large, *self.small) for line in chart.lines)


def collect_series(rows: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Convert logged rows to series, in the order in which names first appear."""
    points_by_name: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time") and (value is None or isinstance(value, bool | int | float)):
                finite = None if value is None or not math.isfinite(value) else float(value)
                points_by_name.setdefault(name, []).append((int(row["step"]), finite))
    series = []
    for name, points in points_by_name.items():
        points.sort(key=lambda point: point[0])
        series.append(Series(name, points, [value for _, value in points if value is not None]))
    return series


def headline_series(series: Sequence[Series]) -> list[Series]:
    """Choose the series that best show learning: held-out results, then rewards, then other measures of success."""
    drawn = [each for each in series if each.values]
    ranked = sorted((each for each in drawn if rank_metric(each.name) < 9), key=lambda each: rank_metric(each.name))
    return ranked[:LARGE_LINES] or drawn[:1]


def make_curves(series: Sequence[Series]) -> Curves:
    """Lay out the charts of all series."""
    leading = headline_series(series)
    remaining = [line for line in series if line.values and line not in leading]
    shown, rest = remaining[:SMALL_CHARTS], remaining[SMALL_CHARTS:]
    # Values between 0 and 1 share a chart for comparison. Other values get separate charts with suitable axes.
    fractions = [line for line in leading if min(line.values) >= 0 and max(line.values) <= 1]
    large = [fractions] if fractions else []
    large += [[line] for line in leading if line not in fractions]
    steps = [line.points[place][0] for line in series for place in (0, -1)]
    span = (min(steps), max(steps)) if steps else (0, 0)
    return Curves(
        tuple(_make_chart(group, span, large=True) for group in large),
        tuple(_make_chart([line], span, large=False) for line in shown),
        tuple(
            (
                line.label,
                format_number(line.values[0]),
                line.last,
                format_number(min(line.values)),
                format_number(max(line.values)),
            )
            for line in rest[:200]
        ),
        tuple(line.gap for line in series if line.gap)[:SMALL_CHARTS],
    )


def rank_metric(name: str) -> int:
    """Rank a metric by name, from 0 (most important: a held-out accuracy) to 9."""
    parts = set(name.lower().replace("/", "_").split("_"))
    held_out = bool(parts & {"eval", "val", "validation", "test"})
    if parts & {"accuracy", "success", "acc"}:
        return 0 if held_out else 3
    if parts & {"reward", "return", "score"}:
        return 1 if held_out else 2
    return 4 if held_out else 9


def _make_chart(group: Sequence[Series], span: tuple[int, int], *, large: bool) -> Chart:
    values = [value for curve in group for value in curve.values]
    low, high = min(values), max(values)
    if 0 <= low < high / 2:
        low = 0.0  # Start the axis at zero if zero is near, so that slopes aren't exaggerated.
    if large and len(group) > 1 and high > 0.6:
        high = 1.0
    x = Axis.with_ends(*span, 8 if large else 4, whole=True)
    y = Axis.with_round_ends(low, high, 5 if large else 3)
    lines = tuple(_make_line(curve, x, y, 300 if large else 120) for curve in group)
    changes = [f"{line.label} from {line.first} to {line.last}" for line in lines]
    return Chart(
        title=", ".join(line.label for line in lines),
        lines=lines,
        x_ticks=tuple(
            (format_percent(x.position(tick)), label) for tick, label in zip(x.ticks, x.tick_labels(), strict=True)
        ),
        y_ticks=tuple(
            (format_percent(1 - y.position(tick)), label) for tick, label in zip(y.ticks, y.tick_labels(), strict=True)
        ),
        summary=f"Steps {span[0]} to {span[1]}: {'; '.join(changes)}.",
    )


def _make_line(series: Series, x: Axis, y: Axis, columns: int) -> Line:
    def place(step: float, value: float) -> tuple[int, int]:
        return round(x.position(step) * WIDTH), round((1 - y.position(value)) * HEIGHT)

    band = ""
    points: Sequence[tuple[float, float | None]] = series.points
    if len(points) > 2 * columns:
        buckets = _bucket_points(series.points, x, columns)
        points = [(step, mean) for step, mean, _, _ in buckets]
        upper = [place(step, high) for step, _, _, high in buckets]
        lower = [place(step, low) for step, _, low, _ in reversed(buckets)]
        band = _line_path([*upper, *lower]) + "z"
    places = [None if value is None else place(step, value) for step, value in points]
    real = [point for point in places if point is not None]
    return Line(
        label=series.label,
        path=_line_path(places),
        band=band,
        dots="".join(f"M{across} {top}h0" for across, top in real) if len(real) <= DOTTED else "",
        first=format_number(series.values[0]),
        last=series.last,
        strong=rank_metric(series.name) in (0, 1, 4),
    )


def _line_path(places: Sequence[tuple[int, int] | None]) -> str:
    """Return an SVG path through the places, with a gap at each None."""
    text, pen = [], "M"
    for place in places:
        if place is None:
            pen = "M"
        else:
            text.append(f"{pen}{place[0]} {place[1]}")
            pen = "L"
    return "".join(text)


def _bucket_points(points: Sequence[Point], x: Axis, columns: int) -> list[tuple[float, float, float, float]]:
    """Group points into columns; return each column's middle step, and mean, lowest and highest value."""
    buckets: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        if value is not None:
            buckets.setdefault(min(columns - 1, int(x.position(step) * columns)), []).append((step, value))
    summaries = []
    for bucket in buckets.values():
        values = [value for _, value in bucket]
        summaries.append(((bucket[0][0] + bucket[-1][0]) / 2, fmean(values), min(values), max(values)))
    return summaries
