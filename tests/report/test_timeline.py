"""Lanes: who was busy when, light however many calls there were, and one round up close."""

from __future__ import annotations

import re

import attrs
import pytest
from tests.report.sample import ROUND, STARTED, calls

from colocate_report.calls import Restart, Span
from colocate_report.timeline import LEVELS, Grid, Lane, Mark, closeup, lane, timeline

ROLES = {"actor": 0, "critic": 1, "reference": 2, "reward": 3}


def span(role: str, start: float, end: float, method: str = "work", slot: int = 0) -> Span:
    return Span("policy", slot, role, method, start, end)


def drawn(*spans: Span, end: float = 10.0, columns: int = 10, strips: int = 10) -> Lane:
    return lane("slot 0", spans, ROLES, Grid(0.0, end, columns), strips)


def heights(area: str, columns: int = 10) -> list[int]:
    """The height in each column of a lane's area."""
    found = [0] * columns
    for column, height in re.findall(r"H(\d+)V(\d+)", area):
        found[int(column) :] = [LEVELS - int(height)] * (columns - int(column))
    return found


def test_a_group_that_was_lost_is_marked_on_its_lanes() -> None:
    spans = [span("actor", 0.0, 10.0), Span("other", 0, "critic", "work", 0.0, 10.0)]
    lost = Restart("policy", "worker 0 was killed", at=2.0, ready=3.0, since=1.0)
    found = timeline(spans, ROLES, 0.0, 10.0, [lost])
    assert [(each.label, each.marks) for each in found.lanes] == [
        ("other 0", ()),
        ("policy 0", (Mark(20.0, 10.0, "worker 0 was killed\n2 s lost"),)),
    ]


class TestLanes:
    def test_the_height_is_the_busy_part_of_the_time(self) -> None:
        found = drawn(span("actor", 1.0, 3.0), span("actor", 5.5, 5.75))
        ((role, area),) = found.areas
        assert role == ROLES["actor"]
        assert heights(area) == [0, 100, 100, 0, 0, 25, 0, 0, 0, 0]
        assert found.busy == "22%"

    def test_roles_lie_on_each_other_the_whole_stack_first(self) -> None:
        found = drawn(span("critic", 0.0, 0.5), span("actor", 0.5, 0.75))
        assert [(role, heights(area)[0]) for role, area in found.areas] == [(1, 75), (0, 25)]

    def test_calls_that_overlap_make_it_no_higher_than_full(self) -> None:
        found = drawn(span("actor", 0.0, 1.0), span("critic", 0.0, 1.0), span("actor", 0.0, 1.0))
        assert [(role, heights(area)[0]) for role, area in found.areas] == [(1, 100), (0, 67)]
        assert found.busy == "10%"

    def test_its_weight_does_not_grow_with_the_calls(self) -> None:
        few = drawn(*(span("actor", n / 10, n / 10 + 0.05) for n in range(100)))
        many = drawn(*(span("actor", n / 1000, n / 1000 + 0.0005) for n in range(10_000)))
        assert len(str(many)) < 1.2 * len(str(few))
        assert len(many.hovers) == 10

    def test_a_pointer_is_told_methods_times_and_numbers_of_calls(self) -> None:
        found = drawn(span("actor", 1.0, 1.2, "act"), span("actor", 1.3, 1.5, "act"), span("critic", 1.9, 3.0, "judge"))
        assert [hover.text for hover in found.hovers] == [
            "1 s to 2 s\nactor.act 400 ms (2 calls)\ncritic.judge 100 ms",
            "2 s to 3 s\ncritic.judge 1 s",
        ]
        assert [(hover.left, hover.width) for hover in found.hovers] == [(10.0, 10.0), (20.0, 10.0)]

    def test_of_many_methods_the_longest_are_named(self) -> None:
        found = drawn(*(span("actor", n / 100, n / 100 + n / 1000, f"m{n}") for n in range(1, 10)))
        lines = found.hovers[0].text.splitlines()
        assert lines[1:] == [*(f"actor.m{n} {n} ms" for n in range(9, 3, -1)), "and 3 more"]


class TestTimeline:
    def test_a_lane_for_each_slot_in_order(self) -> None:
        found = timeline(calls(slots=3), ROLES, STARTED, STARTED + 30)
        assert [each.label for each in found.lanes] == ["slot 0", "slot 1", "slot 2"]
        assert found.hidden == 0
        assert found.ticks[0] == (0.0, "0 s")
        assert found.ticks[-1] == (100.0, "30 s")

    def test_slots_of_several_groups_say_whose_they_are(self) -> None:
        spans = [*calls(slots=1), *calls(slots=1, group="judges")]
        assert [each.label for each in timeline(spans, ROLES, STARTED, STARTED).lanes] == ["judges 0", "policy 0"]

    def test_calls_of_a_clock_that_is_not_ours_stay_inside(self) -> None:
        spans = [span("actor", STARTED - 5, STARTED - 4), span("actor", STARTED + 40, STARTED + 45)]
        (found,) = timeline(spans, ROLES, STARTED, STARTED + 30).lanes
        assert found.busy == "12%"
        assert all(0 <= hover.left <= 100 for hover in found.hovers)

    def test_spans_in_any_order(self) -> None:
        spans = calls()
        assert timeline(spans[::-1], ROLES, STARTED, STARTED) == timeline(spans, ROLES, STARTED, STARTED)

    def test_no_time_at_all(self) -> None:
        found = timeline([span("actor", STARTED, STARTED)], ROLES, STARTED, STARTED)
        assert found.lanes[0].busy == "0%"
        assert found.closeup is None

    def test_nothing(self) -> None:
        assert timeline([], {}, STARTED, STARTED + 1).lanes == ()


class TestCloseup:
    def test_it_shows_one_round_and_not_a_warm_up(self) -> None:
        found = closeup({"slot 0": calls(slots=1, warm_ups=500)}, ROLES, STARTED)
        assert found is not None
        assert found.anchor == "actor.generate"
        ((label, rows, bars),) = found.lanes
        assert (label, rows) == ("slot 0", 1)
        assert [bar.name for bar in bars] == [method for _, method, _ in ROUND]
        assert [bar.role for bar in bars] == [ROLES[role] for role, _, _ in ROUND]
        assert found.lasted == "976 ms"
        assert bars[0].text == "actor.generate\n300 ms, after 0 ms"

    def test_it_says_why_memory_moved(self) -> None:
        spans = [attrs.evolve(each, why="room for role 'critic'") for each in calls(slots=1)]
        found = closeup({"slot 0": spans}, ROLES, STARTED)
        assert found is not None
        assert found.lanes[0][2][0].text == "actor.generate: room for role 'critic'\n300 ms, after 0 ms"

    def test_what_happens_now_and_then_does_not_make_a_round(self) -> None:
        spans: list[Span] = []
        for number in range(6):
            spans += shifted(calls(rounds=10, slots=1, warm_ups=0), number * 20)
            spans.append(span("critic", spans[-1].end, spans[-1].end + 0.01, "save"))
        found = closeup({"slot 0": spans}, ROLES, STARTED)
        assert found is not None
        assert found.anchor == "actor.generate"
        assert len(found.lanes[0][2]) == len(ROUND)

    def test_calls_that_are_many_in_a_round(self) -> None:
        spans, now = [], STARTED
        for _ in range(10):
            for role, method, seconds in [
                ("actor", "act", 0.1),
                *[("critic", "learn", 0.05)] * 8,
                ("actor", "rate", 0.1),
            ]:
                spans.append(span(role, now, now + seconds, method))
                now += seconds
            now += 0.2
        found = closeup({"slot 0": spans}, ROLES, STARTED)
        assert found is not None
        assert found.anchor == "actor.act"
        assert [bar.name for bar in found.lanes[0][2]] == ["act", *["learn"] * 8, "rate"]

    def test_other_slots_show_what_they_did_at_that_time(self) -> None:
        late = [span("critic", each.start + 0.1, each.end + 0.1, slot=1) for each in calls(slots=1)]
        found = closeup({"slot 0": calls(slots=1), "slot 1": late}, ROLES, STARTED)
        assert found is not None
        bars = found.lanes[1][2]
        assert bars[0].left == 0.0
        assert max(bar.left + bar.width for bar in bars) == pytest.approx(100.0, abs=0.02)

    def test_it_is_the_median_round(self) -> None:
        spans, now = [], STARTED
        for spent in (9.0, 1.0, 2.0, 8.0, 1.5, 0.5):
            spans += [span("actor", now, now + 0.1, "act"), span("critic", now + 0.1, now + 0.2, "learn")]
            now += spent
        found = closeup({"slot 0": spans}, ROLES, STARTED)
        assert found is not None
        assert found.lasted == "2 s"

    def test_calls_that_overlap_lie_in_rows(self) -> None:
        spans = [
            span("actor", STARTED + n + part / 10, STARTED + n + part / 10 + 0.25, f"m{part}")
            for n in range(5)
            for part in range(4)
        ]
        found = closeup({"slot 0": spans}, ROLES, STARTED)
        assert found is not None
        _, rows, bars = found.lanes[0]
        assert rows == 3
        assert [bar.row for bar in bars] == [0, 1, 2, 0]

    def test_nothing_that_repeats(self) -> None:
        assert closeup({"slot 0": calls(rounds=2, slots=1, warm_ups=2)}, ROLES, STARTED) is None
        assert closeup({}, ROLES, STARTED) is None


def shifted(spans: list[Span], seconds: float) -> list[Span]:
    return [span(each.role, each.start + seconds, each.end + seconds, each.method) for each in spans]
