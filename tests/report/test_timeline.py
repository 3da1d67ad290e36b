"""Timeline lanes: the busy time of each role, in a bounded size for any number of calls."""

from __future__ import annotations

import re

from colocate_report.calls import Restart, Span
from colocate_report.timeline import LEVELS, Grid, Lane, Mark, make_lane, make_timeline

ROLES = {"actor": 0, "critic": 1, "reference": 2, "reward": 3}


def span(role: str, start: float, end: float, method: str = "work", slot: int = 0) -> Span:
    return Span("policy", slot, role, method, start, end)


def drawn(*spans: Span, end: float = 10.0, columns: int = 10) -> Lane:
    return make_lane("slot 0", spans, ROLES, Grid(0.0, end, columns))


def heights(area: str, columns: int = 10) -> list[int]:
    found = [0] * columns
    for column, height in re.findall(r"H(\d+)V(\d+)", area):
        found[int(column) :] = [LEVELS - int(height)] * (columns - int(column))
    return found


def test_lost_group_is_marked_on_lanes() -> None:
    spans = [span("actor", 0.0, 10.0), Span("other", 0, "critic", "work", 0.0, 10.0)]
    lost = Restart("policy", "worker 0 was killed", at=2.0, ready=3.0, since=1.0)
    found = make_timeline(spans, ROLES, 0.0, 10.0, [lost])
    assert [(each.label, each.marks) for each in found.lanes] == [
        ("other 0", ()),
        ("policy 0", (Mark(20.0, 10.0, "worker 0 was killed\n2 s lost"),)),
    ]


def test_the_height_is_the_busy_part_of_the_time() -> None:
    found = drawn(span("actor", 1.0, 3.0), span("actor", 5.5, 5.75))
    ((role, area),) = found.areas
    assert role == ROLES["actor"]
    assert heights(area) == [0, 100, 100, 0, 0, 25, 0, 0, 0, 0]
    assert found.busy == "22%"


def test_overlapping_calls_stay_within_full_height() -> None:
    found = drawn(span("actor", 0.0, 1.0), span("critic", 0.0, 1.0), span("actor", 0.0, 1.0))
    assert [(role, heights(area)[0]) for role, area in found.areas] == [(1, 100), (0, 67)]
    assert found.busy == "10%"
