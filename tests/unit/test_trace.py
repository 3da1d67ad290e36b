"""`runtime.trace`: a file that says what ran where and when, and who waited for whom."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

import colocate
from colocate import ColocatedGroup, Concat, Role, Scatter, method
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


class Numbers(Role):
    """Makes bytes, and is given them."""

    @method(collect=Concat())
    def make(self, count: int) -> numpy.ndarray[Any, Any]:
        return numpy.full(count, self.ctx.rank, numpy.uint8)

    @method(dispatch=Scatter("rows"), collect=Concat())
    def use(self, rows: Any) -> Any:
        return rows

    @method
    def size(self, whole: Any) -> int:
        return len(whole)


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
    names = {event["args"].get("name") for event in events(path, "M")}
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


def test_bytes_on_their_way(tmp_path: Path) -> None:
    """What comes from another worker has a row of its own beside the slot's; the driver's calls have bytes, too."""
    path, count = tmp_path / "trace.json", 1 << 20
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(2, cpus=0) as pool:
        roles = {"one": colocate.role(Numbers).on(slots=[1]), "both": colocate.role(Numbers)}
        group = pool.spawn(roles, name="group")
        one, both = group.role("one", Numbers), group.role("both", Numbers)
        with runtime.trace(path):
            made = one.make.keep(count)
            assert both.size(made.ref) == [count, count]
            assert len(both.use(made.ref)) == count
            both.size(numpy.zeros(count, numpy.uint8))
            made.fetch()
    threads = {(e["pid"], e["tid"]): e["args"] for e in events(path, "M") if e["name"] == "thread_name"}
    spans = events(path, "X")
    rows = [event for event in spans if event["cat"] == "transfers"]
    assert [event["name"] for event in rows] == ["one.make from slot 1"] * 2
    assert [event["args"]["for"] for event in rows] == ["both.size", "both.use"]
    for event, size in zip(rows, (count, count // 2), strict=True):
        assert size <= event["args"].pop("bytes") <= size + 1000
        assert {**event["args"], "for": ""} == {"from_group": "group", "from_slot": 1, "made_by": "one.make", "for": ""}
        assert threads[event["pid"], event["tid"]] == {"name": "slot 0: from other workers"}
        call = next(e for e in spans if e["name"] == event["args"]["for"] and e["tid"] == 0)
        assert call["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= call["ts"] + call["dur"] + 0.01  # microseconds, rounded
    beside = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events(path, "M") if "sort_index" in e["args"]}
    assert sorted(beside, key=lambda row: beside[row]) == [(1, 0), (1, rows[0]["tid"]), (1, 1)]
    driver = [(e["name"], e["args"]) for e in events(path, "b")]
    assert [name for name, _ in driver] == ["one.make", "both.size", "both.use", "both.size", "fetch of one.make"]
    sent, received = ([args.get(f"{what}_bytes", 0) >> 20 for _, args in driver] for what in ("sent", "received"))
    assert sent == [0, 0, 0, 2, 0]
    assert received == [0, 0, 1, 0, 1]


def test_nobody_listens() -> None:
    """Then nothing is noted, neither here nor in the workers."""
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(2, cpus=0) as pool:
        group = pool.spawn({"one": colocate.role(Numbers), "other": colocate.role(Numbers)}, name="group")
        made = group.role("one", Numbers).make.keep(8)
        call = group.role("other", Numbers).use.submit(made.ref)
        assert len(call.result()) == 16
        pending: Any = call._underway
        assert (pending.sent, pending.taken) == (0, {})


def test_a_trace_where_nobody_may_write(tmp_path: Path) -> None:
    with colocate.connect() as runtime, pytest.raises(FileNotFoundError):
        runtime.trace(tmp_path / "nowhere" / "trace.json")
