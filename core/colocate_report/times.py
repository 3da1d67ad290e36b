"""Add up a run's time: per phase of the job, and per role and method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import attrs

from colocate_report.scale import format_duration, format_number, format_percent, humanize

if TYPE_CHECKING:
    from colocate_report.calls import Total

COLOURS = 8  # The number of colours in the style sheet. Further roles and phases repeat colours.


@attrs.frozen
class Segment:
    """A segment of a bar: name, colour number, width and middle in %, and a text."""

    label: str
    number: int
    width: float
    middle: float
    text: str


@attrs.frozen
class MethodRow:
    """A table row about a role's method: calls, seconds, seconds per call, and share of the wall time, as text."""

    role: str
    number: int
    method: str
    calls: str
    seconds: str
    per_call: str
    share: str


@attrs.frozen
class Bar:
    """A bar of segments, with a table row for each segment: colour number, name, size and share."""

    segments: tuple[Segment, ...]
    rows: tuple[tuple[int, str, str, str], ...]


@attrs.frozen
class Times:
    """A run's time by phase of the job, by role and by method."""

    phases: Bar
    roles: Bar
    methods: tuple[MethodRow, ...]


def make_times(phases: Mapping[str, float], totals: Iterable[Total], roles: Mapping[str, int], seconds: float) -> Times:
    """Add up the time of a run by phase, role and method."""
    places = {role: place for place, role in enumerate(roles)}
    totals = sorted(totals, key=lambda total: (places[total.role], -total.seconds))
    per_role: dict[str, float] = {}
    for total in totals:
        per_role[total.role] = per_role.get(total.role, 0.0) + total.seconds
    return Times(
        phases=make_share_bar(
            [(index % COLOURS, humanize(phase), spent) for index, (phase, spent) in enumerate(phases.items())],
            seconds,
            format_duration,
        ),
        roles=make_share_bar(
            [(roles[role], label_role(role), spent) for role, spent in per_role.items()], seconds, format_duration
        ),
        methods=tuple(_method_rows(totals, roles, seconds)),
    )


def label_role(role: str) -> str:
    """Return a role's name, or "functions" for functions that have no role."""
    return role or "functions"


N = TypeVar("N", int, float)


def make_share_bar(parts: Sequence[tuple[int, str, N]], of: N, text: Callable[[N], str]) -> Bar:
    """Return a bar for parts of the whole `of`. If overlapping parts add up to more, the bar shows their sum."""
    whole = max(of, sum(size for _, _, size in parts)) or 1.0
    rows = tuple((number, label, text(size), _format_share(size, of)) for number, label, size in parts)
    widths = [format_percent(size / whole) for _, _, size in parts]
    ends = accumulate(widths)
    return Bar(
        tuple(
            Segment(label, number, width, end - width / 2, f"{label}\n{size}, {share}")
            for (number, label, size, share), width, end in zip(rows, widths, ends, strict=True)
        ),
        rows,
    )


def _method_rows(totals: Sequence[Total], roles: Mapping[str, int], seconds: float) -> Iterator[MethodRow]:
    several = len({total.group for total in totals}) > 1
    for total in totals:
        yield MethodRow(
            role=(f"{total.group}: " if several else "") + label_role(total.role),
            number=roles[total.role],
            method=total.method,
            calls=format_number(total.calls),
            seconds=format_duration(total.seconds),
            per_call=format_duration(total.seconds / max(1, total.calls)),
            share=_format_share(total.seconds, seconds),
        )


def _format_share(size: float, of: float) -> str:
    if of <= 0:
        return ""
    share = size / of
    return "< 1%" if 0 < share < 0.005 else f"{share:.0%}"
