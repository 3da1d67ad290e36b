"""`runtime.trace`: a file that says what ran where and when, and who waited for whom."""

from __future__ import annotations

import asyncio
import json
import os
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

    @method
    async def fail_later(self) -> None:
        await asyncio.sleep(0.01)
        raise ValueError("not then")


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
    assert all(type(event["ts"]) is int and event["pid"] > 0 and event["tid"] > 0 for event in found)
    busy: dict[tuple[int, int], int] = {}
    for event in sorted((each for each in found if each["ph"] == "X"), key=lambda each: (each["ts"], each["dur"])):
        row = event["pid"], event["tid"]
        assert busy.get(row, 0) <= event["ts"], "Perfetto leaves out what overlaps on a thread"
        busy[row] = event["ts"] + event["dur"]
    return [event for event in found if event["ph"] == kind]


def rows(path: Path) -> dict[tuple[int, int], str]:
    """The names of threads."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}


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
                one.fail.options(ranks=[0])()
        one.work()  # which isn't traced any more
    names = {event["args"].get("name") for event in events(path, "M")}
    assert {"driver", "group group", *(f"slot {slot} ({p.node}, cpu)" for slot, p in enumerate(pool.slots))} <= names
    of = rows(path)
    spans = [(event["name"], of[2, event["tid"]][:6], event["args"]["rank"]) for event in events(path, "X")]
    assert sorted(spans) == [
        ("one.fail", "slot 0", 0),
        ("one.work", "slot 0", 0),
        ("one.work", "slot 1", 1),
        ("other.wait", "slot 1", 0),
    ]
    late = next(event for event in events(path, "X") if event["name"] == "one.work" and event["args"]["rank"] == 1)
    assert late["args"]["waited_for"] == "other.wait"
    assert late["args"]["waited_ms"] >= 0
    calls = {event["name"]: event for event in events(path, "b")}
    assert list(calls) == ["other.wait", "one.work", "one.fail"]
    raised = {event["name"]: event["args"]["error"] for event in events(path, "X") if "error" in event["args"]}
    assert raised == {"one.fail": calls["one.fail"]["args"]["error"]}
    assert "not today" in raised["one.fail"]
    assert [event["id2"]["local"] for event in events(path, "e")] == ["0x1", "0x2", "0x3"]
    for record in told[:3]:
        begin = next(event for event in events(path, "b") if event["name"] == f"{record.role}.{record.method}")
        assert begin["ts"] == pytest.approx(record.submitted * 1e6, abs=1.0)


def test_failures(tmp_path: Path) -> None:
    """What has raised is where it ran, for as long as it did; a call that is given up ends when that is known."""
    path = tmp_path / "trace.json"
    told: dict[str, colocate.CallRecord] = {}

    class Listening:
        def colocate_call_finished(self, record: colocate.CallRecord) -> None:
            told[record.method] = record

    with colocate.connect() as runtime, runtime.reserve(2, cpus=0) as pool:
        group = spawned(pool)
        one = group.role("one", Worker)
        runtime.observe(Listening())
        with runtime.trace(path):
            with pytest.raises(RoleError):
                one.fail.options(ranks=[0])()
            with pytest.raises(RoleError):
                one.fail_later()
            Worker.gate.clear()
            late = one.wait.options(timeout=0.05).submit()
            also_late = group.role("other", Worker).work.options(timeout=0.05).submit()
            with pytest.raises(colocate.CallTimeout):
                late.result(20)
            with pytest.raises(colocate.CallTimeout):
                also_late.result(20)
            Worker.gate.set()
    failed, later, late_one, behind = told["fail"], told["fail_later"], told["wait"], told["work"]
    assert failed.raised == failed.ranks == (0,)
    assert 1 <= len(later.raised) <= 2  # the first tells it; the other one may have, too
    assert later.raised == later.ranks
    for record in (failed, later):
        assert all(record.submitted <= start <= end <= record.finished for _, start, end in record.spans)
    assert all(end - start >= 0.01 for _, start, end in later.spans)
    assert late_one.raised == late_one.spans == ()
    assert late_one.finished - late_one.submitted >= 0.05
    assert [rank for rank, _ in late_one.unfinished] == [0, 1]
    assert all(late_one.submitted <= since <= late_one.finished for _, since in late_one.unfinished)
    assert behind.unfinished == behind.ran == ()  # it had not begun
    spans = {(event["name"], event["args"]["rank"]): event for event in events(path, "X")}
    assert [name for name, _ in spans].count("one.fail") == 1
    for rank in (0, 1):
        span = spans["one.wait", rank]
        assert "not done when it failed" in span["args"]
        assert 0.05e6 <= span["dur"] <= (late_one.finished - late_one.submitted) * 1e6 + 1
    assert failed.unfinished == ()
    assert {*later.raised, *(rank for rank, _ in later.unfinished)} == {0, 1}


def test_a_worker_that_dies(tmp_path: Path) -> None:
    """What it ran is in the trace until that was known, and so is what others ran meanwhile; what waited isn't."""
    path = tmp_path / "trace.json"
    told: dict[str, colocate.CallRecord] = {}

    class Dying(Role):
        @method
        def end(self) -> None:
            if self.ctx.rank:
                os._exit(3)
            threading.Event().wait(60)

        @method
        def behind(self) -> None: ...

    class Listening:
        def colocate_call_finished(self, record: colocate.CallRecord) -> None:
            told[record.method] = record

    with colocate.connect("local", processes=True) as runtime, runtime.reserve(2, cpus=0) as pool:
        group = pool.spawn({"dying": colocate.role(Dying)}, name="group")
        role = group.role("dying", Dying)
        runtime.observe(Listening())
        with runtime.trace(path):
            calls = [role.end.submit(), role.behind.submit()]
            for call in calls:
                with pytest.raises(colocate.ColocateError):
                    call.result(20)
    assert told["end"].spans == told["end"].raised == ()
    assert [rank for rank, _ in told["end"].unfinished] == [0, 1]
    assert told["behind"].ran == ()
    spans = [(event["name"], event["args"]["rank"]) for event in events(path, "X")]
    assert sorted(spans) == [("dying.end", 0), ("dying.end", 1)]


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
    of, spans = rows(path), events(path, "X")
    told = [event for event in spans if event["cat"] == "transfers"]
    assert [event["name"] for event in told] == ["one.make from slot 1"] * 2
    assert [event["args"]["for"] for event in told] == ["both.size", "both.use"]
    for event, size in zip(told, (count, count // 2), strict=True):
        assert size <= event["args"].pop("bytes") <= size + 1000
        assert {**event["args"], "for": ""} == {"from_group": "group", "from_slot": 1, "made_by": "one.make", "for": ""}
        assert of[event["pid"], event["tid"]] == "slot 0: from other workers"
        call = next(e for e in spans if e["name"] == event["args"]["for"] and e["args"]["rank"] == 0)
        assert call["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= call["ts"] + call["dur"]
    beside = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events(path, "M") if "sort_index" in e["args"]}
    assert sorted(beside, key=lambda row: beside[row]) == sorted(beside)
    names = [of[row].partition(" (")[0] for row in sorted(beside)]
    assert names == ["slot 0", "slot 0: from other workers", "slot 1"]
    driver = [(e["name"], e["args"]) for e in events(path, "b")]
    assert [name for name, _ in driver] == ["one.make", "both.size", "both.use", "both.size", "fetch of one.make"]
    sent, received = ([args.get(f"{what}_bytes", 0) >> 20 for _, args in driver] for what in ("sent", "received"))
    assert sent == [0, 0, 0, 2, 0]
    assert received == [0, 0, 1, 0, 1]


def test_what_overlaps(tmp_path: Path) -> None:
    """Calls of async methods that run at the same time have a row each; it is free again afterwards."""
    path = tmp_path / "trace.json"

    class Waiting(Role):
        @method(concurrency=2)
        async def meet(self) -> None:
            here, self.other = asyncio.Event(), getattr(self, "other", None)
            if self.other is None:
                self.other = here
                await here.wait()
            else:
                self.other.set()
            self.other = None

    with colocate.connect() as runtime, runtime.reserve(1, cpus=0) as pool:
        waiting = pool.spawn({"waiting": colocate.role(Waiting)}, name="group").role("waiting", Waiting)
        with runtime.trace(path):
            for _ in range(3):
                calls = [waiting.meet.submit() for _ in range(2)]
                for call in calls:
                    call.result(20)
    found = events(path, "X")
    assert len(found) == 6
    assert sorted(name.partition(" (")[0] for name in rows(path).values()) == ["slot 0", "slot 0"]


def test_memory_has_a_row(tmp_path: Path) -> None:
    """What moves while calls run is beside them, with its bytes, and with what stays and why."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "trace.json"

    class Holding(Role):
        def __init__(self) -> None:
            self.memory = torch.ones(1 << 20, dtype=torch.uint8)
            self.given = torch.ones(1 << 16, dtype=torch.uint8)

        @method(awake=())
        def give(self) -> Any:
            return self.given

    with colocate.connect("local", processes=True) as runtime, runtime.reserve(1, cpus=0) as pool:
        group = pool.spawn({"holding": colocate.role(Holding)}, name="group")
        kept = group.role("holding", Holding).give.keep()
        with runtime.trace(path):
            gone = group.sleep("holding")
            group.role("holding", Holding).give()
            group.wake("holding")
        kept.free()
    of = rows(path)
    moved = [e for e in events(path, "X") if of[e["pid"], e["tid"]] == "slot 0: memory"]
    assert [(e["name"], e["args"]["bytes"]) for e in moved] == [("holding sleep", gone), ("holding wake", gone)]
    assert [e["args"]["why"] for e in moved] == ["asked for"] * 2
    assert [e["args"].get("kept awake") for e in moved] == [{"used by residents": 1 << 16}, None]
    assert [e["args"] for e in events(path, "C")] == [{"holding": gone}, {"holding": 0}]


def test_what_sleeps_after_a_restart(tmp_path: Path) -> None:
    """Nothing does: roles are made anew."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "trace.json"

    class Mortal(Role):
        def __init__(self) -> None:
            self.memory = torch.ones(1 << 20, dtype=torch.uint8)

        @method(awake=())
        def die(self) -> None:
            os._exit(1)

    with colocate.connect("local", processes=True) as runtime, runtime.reserve(1, cpus=0) as pool:
        group = pool.spawn({"mortal": colocate.role(Mortal)}, name="group", on_failure="restart")
        with runtime.trace(path):
            for _ in range(2):
                gone = group.sleep("mortal")
                with pytest.raises(colocate.ColocateError):
                    group.role("mortal", Mortal).die()
                group.wait_ready()
    assert [e["args"] for e in events(path, "C")] == [{"mortal": gone}, {"mortal": 0}] * 2


def test_two_of_one_file(tmp_path: Path) -> None:
    """The second would write into the first one's lines. One that has ended is replaced."""
    path = tmp_path / "trace.json"
    with colocate.connect() as runtime:
        with runtime.trace(path):
            before = path.read_text()
            with pytest.raises(OSError, match=r"another trace is being written there: .*trace\.json"):
                runtime.trace(path)
            assert path.read_text() == before
        with runtime.trace(path):
            pass
    assert path.read_text().count("[") == before.count("[")
