"""A wait is contention if the call could have run and another role of the slot ran."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

import colocate
from colocate.testing.gate import Address, Gate, pass_gate
from colocate_report.calls import CallLog, SleepTimes
from colocate_report.contention import BusySpan, Move, RoleUse, measure_contention

LANE = [
    BusySpan(0.0, 2.0, "actor", 0.0),
    BusySpan(2.0, 3.0, "critic", 0.5),  # it waits for the actor from 0.5 on
    BusySpan(3.0, 4.0, "critic", 0.5),  # This one does, too, and then waits for its own role.
    BusySpan(4.0, 5.0, "actor", 3.5),  # It waits half a second for the critic.
    BusySpan(6.0, 7.0, "reward", 5.5),  # It waits for no role.
]


def test_contention_names_the_blocking_role() -> None:
    assert measure_contention({("policy", 0): reversed(LANE)}, {("policy", "critic"): (2, 7)}) == [
        RoleUse("policy", "actor", 3.0, {"critic": 0.5}, 0),
        RoleUse("policy", "critic", 2.0, {"actor": 1.5}, 7, moves=2),
        RoleUse("policy", "reward", 1.0, {}, 0),
    ]


def test_calls_that_overlap() -> None:
    """Seconds of overlapping calls, as of async methods, count once, and a short call hides no long one."""
    lane = [
        *[BusySpan(0.0, 10.0, "actor", 0.0)] * 4,
        BusySpan(1.0, 2.0, "actor", 1.0),
        BusySpan(10.0, 11.0, "critic", 5.0),
    ]
    (actor, critic) = measure_contention({("policy", 0): lane}, {})
    assert (actor.busy, critic.waited) == (10.0, {"actor": 5.0})


def move(role: str, rank: int, start: float, end: float, asleep: bool, kind: str = "sleep") -> colocate.MoveRecord:
    return colocate.MoveRecord("policy", role, rank, kind, 8, start, end, asleep, "asked for")


def test_how_long_a_role_is_awake() -> None:
    """A rank is awake until its sleep is complete, from the start of a wake, and when its group is made anew."""
    naps = SleepTimes(10.0)
    assert naps.awake_seconds(20.0) == {}
    for rank in (0, 1):
        naps.add_rank("policy", "actor", rank)
    naps.add_rank("policy", "", 0)  # Functions have no role.
    naps.record_move(move("actor", 0, 11.0, 12.0, False))  # Only a part of the memory moves.
    assert naps.awake_seconds(20.0) == {}
    naps.record_move(move("actor", 0, 13.0, 14.0, True))
    naps.record_move(move("critic", 0, 13.0, 15.0, True))
    assert naps.awake_seconds(20.0) == {("policy", "actor"): 4.0 + 10.0, ("policy", "critic"): 5.0}
    naps.record_move(move("actor", 0, 16.0, 17.0, False, "wake"))
    naps.wake_group("policy", 18.0)
    assert naps.awake_seconds(20.0) == {("policy", "actor"): 8.0 + 10.0, ("policy", "critic"): 5.0 + 2.0}


def test_moves_are_reported_as_spans() -> None:
    """Each move is a span of its slot and no call; a move that a call waits for is a part of the call."""
    calls = CallLog(lambda group, role, rank: rank + 1)
    calls.colocate_memory_moved(move("actor", 0, 11.0, 12.0, True))
    calls.colocate_memory_moved(attrs.evolve(move("critic", 0, 12.0, 14.0, False, "wake"), in_call=True))
    calls.colocate_memory_moved(move("actor", 0, 14.0, 16.0, False, "wake"))
    assert [(each.slot, each.role, each.method, each.start, each.end) for each in calls.last_spans()] == [
        (1, "actor", "sleep", 11.0, 12.0),
        (1, "critic", "wake", 12.0, 14.0),
        (1, "actor", "wake", 14.0, 16.0),
    ]
    assert calls.method_totals() == ()
    assert {use.role: (use.busy, use.moving, use.moves, use.moved) for use in calls.measure_contention()} == {
        "actor": (3.0, 3.0, 2, 16),
        "critic": (0.0, 2.0, 1, 8),
    }


def test_busy_seconds_of_slot_add_up() -> None:
    """A slot's busy seconds add up: no second counts twice, neither in a call nor in a move for it."""
    lane = [
        BusySpan(0.0, 4.0, "critic", 0.0),
        BusySpan(0.0, 1.0, "actor", 0.0, Move.IN_CALL),
        BusySpan(1.0, 2.0, "critic", 1.0, Move.IN_CALL),
        BusySpan(4.0, 5.0, "actor", 4.0, Move.ALONE),
        BusySpan(5.0, 6.0, "reward", 0.0),
    ]
    uses = measure_contention({("policy", 0): lane}, {})
    assert sum(use.busy for use in uses) == 6.0
    assert {use.role: (use.busy, use.moving, dict(use.waited)) for use in uses} == {
        "critic": (4.0, 1.0, {}),
        "actor": (1.0, 2.0, {}),
        "reward": (1.0, 0.0, {"critic": 4.0, "actor": 1.0}),
    }


class First(colocate.Role):
    @colocate.method
    def work(self, gate: Address) -> int:
        pass_gate(gate)
        return 1


class Second(colocate.Role):
    @colocate.method
    def use(self, value: object = None) -> int:
        return 2


@pytest.mark.parametrize("depends", [False, True])
def test_wait_for_used_result_is_no_contention(tmp_path: Path, depends: bool) -> None:
    """A wait for another role's result isn't contention; the same wait of a call that doesn't use the result is."""
    with colocate.connect("local") as runtime, Gate() as gate:
        group = runtime.reserve(1).spawn({"first": colocate.role(First), "second": colocate.role(Second)})
        with colocate.record(runtime, tmp_path / "run") as run:
            value = group.role("first", First).work.keep(gate.address)
            call = group.role("second", Second).use.submit(value.ref if depends else None)
            gate.wait_for(1)
            gate.open()
            call.result()
            value.free()
    assert run.record is not None
    (second,) = [use for use in run.record.contention if use.role == "second"]
    assert bool(second.waited) is not depends
    assert ("who waited for whom" in (run.directory / "log.txt").read_text()) is not depends
