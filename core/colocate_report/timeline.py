"""When each slot was busy for which role: the whole run, and one round of it up close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from colocate_report.closeup import Closeup, closeup
from colocate_report.lanes import Grid, Lane, Mark, lane
from colocate_report.scale import percent, time_ticks

if TYPE_CHECKING:
    from colocate_report.calls import Span
    from colocate_report.restarts import Restart

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
    return Timeline(
        lanes=tuple(
            attrs.evolve(
                lane(labels[slot], slots[slot], roles, grid, strips),
                marks=tuple(
                    _mark(each, start, end) for each in restarts if each.group == slot[0] and each.ready > start
                ),
            )
            for slot in shown
        ),
        hidden=len(ordered) - len(shown),
        columns=grid.columns,
        ticks=time_ticks(end - start, 10),
        closeup=closeup({labels[slot]: slots[slot] for slot in shown}, roles, start),
    )


def _mark(restart: Restart, start: float, end: float) -> Mark:
    whole = (end - start) or 1.0
    left, right = max(0.0, (restart.at - start) / whole), min(1.0, (restart.ready - start) / whole)
    return Mark(percent(left), percent(right - left), f"{restart.what}\n{restart.lost:.0f} s lost")
