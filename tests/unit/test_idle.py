"""Each idle second of a slot has a cause: for constructed calls with known causes, and for real ones."""

from __future__ import annotations

import time
from typing import Any

import pytest

import colocate
from colocate import CallRecord, MoveRecord
from colocate.driver import RECENT_S, Driver, RecentCalls
from colocate.features.looking.idle import DRIVER, IdleTracker, Slot, TimedCall, measure_idle
from colocate_run.cli.top import slot_rows

A, B, C = ("policy", 0), ("policy", 1), ("rewards", 0)


def called(label: str, submitted: float, ran: dict[Slot, tuple[float, float]], ready: float | None = None) -> TimedCall:
    return TimedCall(label, submitted, submitted if ready is None else ready, ran)


GENERATE = called("rollout.generate", 1.0, {A: (1.0, 3.0), B: (1.0, 6.0)})
SCORE = called("reward.score", 6.5, {C: (6.5, 8.0)})
UPDATE = called("actor.update", 8.0, {A: (8.0, 9.0), B: (8.0, 9.0)})


def test_every_second_has_one_cause() -> None:
    """Stragglers, the driver and another role's call are the causes of the idle seconds around the calls."""
    found = measure_idle([UPDATE, SCORE, GENERATE], (), dict.fromkeys((A, B, C), (0.0, 10.0)))
    assert found[A] == {
        "the last ranks of rollout.generate": 3.0,
        "reward.score": 1.5,
        DRIVER: 1.0 + 0.5 + 1.0,
    }
    assert found[B] == {"reward.score": 1.5, DRIVER: 1.0 + 0.5 + 1.0}
    assert found[C] == {"rollout.generate": 5.0, "actor.update": 1.0, DRIVER: 1.0 + 0.5 + 1.0}
    busy = {A: 3.0, B: 6.0, C: 1.5}
    for slot, causes in found.items():
        assert sum(causes.values()) == pytest.approx(10.0 - busy[slot])


def test_old_ones_are_forgotten() -> None:
    idling = IdleTracker(lambda group, role, rank: rank + 1, max_calls=3)
    for at in (1.0, 2.0, 3.0):
        spans = ((0, at, at + 0.5), (1, at, at + 0.6))
        idling.add_call(CallRecord("policy", "a", "run", (0, 1), at, at + 1, spans, False, None, at))
        idling.add_move(MoveRecord("policy", "a", 0, "sleep", 1, at, at + 0.1, True, "asked for"))
    sleep = CallRecord("policy", "", "the sleep", (0,), 1.0, 2.0, ((0, 1.0, 2.0),), False, None, 1.0)
    idling.add_call(sleep)  # Each of its moves is recorded apart.
    calls, moves = idling.copy_records()
    assert [each.submitted_at for each in calls] == [3.0]
    assert len(moves) == 3
    idling.forget_before(3.05)
    assert [each.submitted_at for each in idling.copy_records()[0]] == [3.0]
    assert len(idling.copy_records()[1]) == 1
    assert idling.list_slots() == {("policy", 1), ("policy", 2)}


class Sleeper(colocate.Role):
    """A role that works for as many seconds as it is given."""

    @colocate.method(dispatch=colocate.PerRank("seconds"))
    def work(self, seconds: Any) -> None:
        time.sleep(seconds)


def test_glance_shows_waiting_rank() -> None:
    """A glance shows that rank 0, whose part has ended, waits for rank 1."""
    with colocate.connect() as runtime, runtime.reserve(2) as pool:
        sleeper = pool.spawn({"sleeper": colocate.role(Sleeper)}).role("sleeper", Sleeper)
        driver = Driver(runtime)
        recent = RecentCalls(driver.slot_of)
        runtime.observe(recent)
        call = sleeper.work.submit([0.0, 0.6])
        time.sleep(0.3)
        first, second = driver.glance(recent)[0]["slots"]
        call.result()
    waited = first["idle"]["the last ranks of sleeper.work"] * RECENT_S
    assert 0.2 < waited < 0.6
    assert set(second["idle"]) <= {DRIVER}
    assert [row["idle for"] for row in slot_rows({"groups": [{"group": "g", "state": "ready", "slots": [first]}]})] == [
        f"the last ranks of sleeper.work {waited / RECENT_S:.0%}"
    ]


def test_run_reports_slot_waits(tmp_path: object) -> None:
    """A run's record and report say that rank 0 waited for rank 1, and both for the driver."""
    with colocate.connect() as runtime, runtime.reserve(2) as pool:
        group = pool.spawn({"sleeper": colocate.role(Sleeper)}, name="policy")
        sleeper = group.role("sleeper", Sleeper)
        with colocate.record(runtime, f"{tmp_path}/run") as run:
            sleeper.work([0.05, 0.45])
            time.sleep(0.2)
            sleeper.work([0.05, 0.05])
        assert run.record is not None
        found = run.record.idle
        assert 0.3 < found["the last ranks of sleeper.work"] < 0.8  # the machine may be busy
        assert 0.3 < found[DRIVER] < 1.2
        page = (run.directory / "report.html").read_text()
    assert "What idle slots waited for" in page
    assert "the last ranks of sleeper.work" in page
