"""Where the time went: per phase of the job, and per role and method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from colocate.report.scale import duration, number, percent, words

if TYPE_CHECKING:
    from colocate._calls import Total


@attrs.frozen
class Segment:
    """A part of a stacked bar: its name, number (for the colour), width in %, and text."""

    label: str
    number: int
    width: float
    text: str


@attrs.frozen
class MethodRow:
    """A method of a role: calls, seconds, seconds per call, part of the wall time; all as text but the number."""

    role: str
    number: int
    method: str
    calls: str
    seconds: str
    per_call: str
    share: str


@attrs.frozen
class Times:
    """Two bars over the run's wall time, with tables."""

    phases: tuple[Segment, ...]
    phase_rows: tuple[tuple[int, str, str, str], ...]
    roles: tuple[Segment, ...]
    method_rows: tuple[MethodRow, ...]


def times(
    phases: Mapping[str, float], totals: Iterable[Total], roles: Mapping[str, int], seconds: float
) -> Times:
    """Where the time of a run went.

    Args:
        phases: Seconds per phase.
        totals: Calls and seconds per method.
        roles: The roles' numbers.
        seconds: The run's wall time.
    """
    totals = sorted(totals, key=lambda total: (roles[total.role], -total.seconds))
    several = len({total.group for total in totals}) > 1
    per_role: dict[str, float] = {}
    for total in totals:
        per_role[total.role] = per_role.get(total.role, 0.0) + total.seconds
    numbered = {phase: index for index, phase in enumerate(phases)}
    return Times(
        phases=_segments({words(phase): spent for phase, spent in phases.items()}, list(numbered.values()), seconds),
        phase_rows=tuple(
            (numbered[phase], words(phase), duration(spent), _share(spent, seconds)) for phase, spent in phases.items()
        ),
        roles=_segments(
            {role or "functions": spent for role, spent in per_role.items()}, [roles[role] for role in per_role], seconds
        ),
        method_rows=tuple(
            MethodRow(
                role=(f"{each.group}: " if several else "") + (each.role or "functions"),
                number=roles[each.role],
                method=each.method,
                calls=number(each.calls),
                seconds=duration(each.seconds),
                per_call=duration(each.seconds / max(1, each.calls)),
                share=_share(each.seconds, seconds),
            )
            for each in totals
        ),
    )


def _segments(parts: Mapping[str, float], numbers: Iterable[int], seconds: float) -> tuple[Segment, ...]:
    """Parts of a bar that stands for the wall time, or for their sum when they overlap and are more."""
    whole = max(seconds, sum(parts.values())) or 1.0
    return tuple(
        Segment(label, index, percent(spent / whole), f"{label}\n{duration(spent)}, {_share(spent, seconds)}")
        for (label, spent), index in zip(parts.items(), numbers, strict=True)
    )


def _share(spent: float, seconds: float) -> str:
    return f"{spent / seconds:.0%}" if seconds > 0 else "–"
