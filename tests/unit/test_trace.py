"""`runtime.trace`: a file that says what ran where and when, and who waited for whom."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Role, method
from colocate.errors import RoleError


class Worker(Role):
    """Works, or raises."""

    gate = threading.Event()

    @method
    def work(self) -> int:
        return self.ctx.rank

    @method
    def wait(self) -> None:
        assert self.gate.wait(20)

    @method
    def fail(self) -> None:
        raise ValueError("not today")


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    """Those of a kind, in their order."""
    found: list[dict[str, Any]] = json.loads(path.read_text())
    assert all({"ph", "ts", "pid", "name"} <= event.keys() for event in found)
    return [event for event in found if event["ph"] == kind]


def spawned(pool: colocate.Pool) -> ColocatedGroup:
    return pool.spawn({"one": colocate.role(Worker), "other": colocate.role(Worker).on(slots=[1])}, name="group")


def test_trace(tmp_path: Path) -> None:
    """Calls are on the slots on which they ran, and on the driver from their submission to their end."""
    path = tmp_path / "trace.json"
    told: list[colocate.CallRecord] = []

    class Listening:
        def colocate_call_finished(self, record: colocate.CallRecord) -> None:
            told.append(record)

    with colocate.connect() as runtime, runtime.reserve(2, cpus=0) as pool:
        group = spawned(pool)
        one, other = group.role("one", Worker), group.role("other", Worker)
        one.work()
        runtime.observe(Listening())
        with runtime.trace(path):
            Worker.gate.clear()
            waiting = other.wait.submit()
            behind = one.work.submit()
            Worker.gate.set()
            waiting.result(20)
            behind.result(20)
            with pytest.raises(RoleError):
                one.fail()
        one.work()  # which isn't traced any more
    names = {event["args"]["name"] for event in events(path, "M")}
    assert {"driver", "group group", *(f"slot {slot} ({p.node}, cpu)" for slot, p in enumerate(pool.slots))} <= names
    spans = [(event["name"], event["tid"], event["args"]["rank"]) for event in events(path, "X")]
    assert sorted(spans) == [("one.work", 0, 0), ("one.work", 1, 1), ("other.wait", 1, 0)]
    late = next(event for event in events(path, "X") if event["name"] == "one.work" and event["tid"] == 1)
    assert late["args"]["waited_for"] == "other.wait"
    assert late["args"]["waited_ms"] >= 0
    calls = {event["name"]: event for event in events(path, "b")}
    assert list(calls) == ["other.wait", "one.work", "one.fail"]
    assert "not today" in calls["one.fail"]["args"]["error"]
    assert [event["id"] for event in events(path, "e")] == [1, 2, 3]
    for record in told[:3]:
        begin = next(event for event in events(path, "b") if event["name"] == f"{record.role}.{record.method}")
        assert begin["ts"] == pytest.approx(record.submitted * 1e6, abs=1.0)


def test_a_trace_that_nobody_has_ended(tmp_path: Path) -> None:
    """What was told is in the file, up to its end bracket, which viewers don't need."""
    path = tmp_path / "trace.json"
    with colocate.connect() as runtime, runtime.reserve(2, cpus=0) as pool:
        trace = runtime.trace(path)
        spawned(pool)["one"].work()
        runtime._node.services.settle()
        assert "one.work" in [event["name"] for event in json.loads(path.read_text() + "]")]
        pool.close()
    trace.close()
    assert [event["name"] for event in events(path, "i")][-1] == "group group is closed"
    trace.close()


def test_a_trace_where_nobody_may_write(tmp_path: Path) -> None:
    with colocate.connect() as runtime, pytest.raises(FileNotFoundError):
        runtime.trace(tmp_path / "nowhere" / "trace.json")
