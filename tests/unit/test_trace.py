"""`runtime.trace`: a file of what ran where and when, with the waits of calls for each other."""

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
    """Check a trace; return its events of one kind, in order."""
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
    """Return the names of a trace's threads."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}


def spawned(pool: colocate.Pool) -> ColocatedGroup:
    return pool.spawn({"one": colocate.role(Worker), "other": colocate.role(Worker).on(slots=[1])}, name="group")


class Listening:
    """Records calls that have ended."""

    def __init__(self) -> None:
        self.told: dict[str, colocate.CallRecord] = {}

    def colocate_call_finished(self, record: colocate.CallRecord) -> None:
        self.told[f"{record.role}.{record.method}"] = record


def test_trace(tmp_path: Path) -> None:
    """A trace has each call on the slots where it ran, and on the driver from its submission to its end."""
    path, listening = tmp_path / "trace.json", Listening()
    with colocate.connect() as runtime, runtime.reserve(2, cpus=0) as pool:
        group = spawned(pool)
        one, other = group.role("one", Worker), group.role("other", Worker)
        one.work()
        runtime.observe(listening)
        with runtime.trace(path):
            Worker.gate.clear()
            waiting = other.wait.submit()
            behind = one.work.submit()
            Worker.gate.set()
            waiting.result(20)
            behind.result(20)
            with pytest.raises(RoleError):
                one.fail.options(ranks=[0])()
            with pytest.raises(OSError, match=r"another trace is being written there: .*trace\.json"):
                runtime.trace(path)
        other.work()  # no longer traced
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
    for name, begin in calls.items():
        assert begin["ts"] == pytest.approx(listening.told[name].submitted * 1e6, abs=1.0)


def test_phases_and_steps_of_a_run(tmp_path: Path) -> None:
    """A run's phases and steps are on the driver, in order."""
    path = tmp_path / "trace.json"
    with colocate.connect() as runtime, runtime.trace(path), colocate.record(runtime, tmp_path / "run") as run:
        with run.timed("rollout"):
            pass
        run.log(1, loss=0.5)
    (begun,), (ended,), (step,) = (events(path, kind) for kind in "bei")
    assert [(each["name"], each["cat"], each["id2"]) for each in (begun, ended)] == [
        ("rollout", "phases", begun["id2"])
    ] * 2
    assert step["name"] == "step 1"
    assert begun["ts"] <= ended["ts"] <= step["ts"]
    assert begun["pid"] == step["pid"]


def test_failures(tmp_path: Path) -> None:
    """A call that raises is traced where and while it ran; a call that times out ends in the trace at the timeout."""
    path, listening = tmp_path / "trace.json", Listening()
    with colocate.connect() as runtime, runtime.reserve(2, cpus=0) as pool:
        group = spawned(pool)
        one = group.role("one", Worker)
        runtime.observe(listening)
        with runtime.trace(path):
            with pytest.raises(RoleError):
                one.fail_later()
            Worker.gate.clear()
            late = one.wait.options(timeout=0.05).submit()
            also_late = group.role("other", Worker).work.options(timeout=0.05).submit()
            for call in (late, also_late):
                with pytest.raises(colocate.CallTimeout):
                    call.result(20)
            Worker.gate.set()
    later, late_one, behind = (listening.told[name] for name in ("one.fail_later", "one.wait", "other.work"))
    assert 1 <= len(later.raised) <= 2  # The first error fails the call; the other may have arrived, too.
    assert later.raised == later.ranks
    assert {*later.raised, *(rank for rank, _ in later.unfinished)} == {0, 1}
    for _, start, end in later.spans:
        assert later.submitted <= start <= start + 0.01 <= end <= later.finished
    assert late_one.raised == late_one.spans == ()
    assert [rank for rank, _ in late_one.unfinished] == [0, 1]
    assert all(late_one.submitted <= since <= late_one.finished for _, since in late_one.unfinished)
    assert behind.unfinished == behind.ran == ()  # This call had not begun.
    spans = {(event["name"], event["args"]["rank"]): event for event in events(path, "X")}
    for rank in (0, 1):
        span = spans["one.wait", rank]
        assert "not done when it failed" in span["args"]
        assert 0.05e6 <= span["dur"] <= (late_one.finished - late_one.submitted) * 1e6 + 1


class Mortal(Role):
    """Has memory that sleeps and memory that is returned; one rank dies."""

    def __init__(self) -> None:
        import torch

        self.memory = torch.ones(1 << 20, dtype=torch.uint8)
        self.given = torch.ones(1 << 16, dtype=torch.uint8)

    @method(awake=())
    def give(self) -> Any:
        return self.given

    @method(awake=())
    def end(self) -> None:
        if self.ctx.rank:
            os._exit(3)
        threading.Event().wait(60)

    @method
    def behind(self) -> None: ...


def test_memory_and_a_worker_that_dies(tmp_path: Path) -> None:
    """Each sleep and wake is a span with its bytes and the memory that stays; a restart resets the counter.

    A call is in the trace until the death is known, on all ranks; a call that waited behind it isn't.
    """
    path, listening = tmp_path / "trace.json", Listening()
    with colocate.connect("local", processes=True) as runtime, runtime.reserve(2, cpus=0) as pool:
        group = pool.spawn({"mortal": colocate.role(Mortal)}, name="group", on_failure="restart")
        mortal = group.role("mortal", Mortal)
        runtime.observe(listening)
        kept = mortal.give.keep()
        with runtime.trace(path):
            gone = group.sleep("mortal") // 2
            group.wake("mortal")
            kept.free()
            group.sleep("mortal")
            for call in [mortal.end.submit(), mortal.behind.submit()]:
                with pytest.raises(colocate.ColocateError):
                    call.result(20)
            group.wait_ready()
    of, spans = rows(path), events(path, "X")
    moved = [e for e in spans if of[e["pid"], e["tid"]] == "slot 0: memory"]
    assert [(e["name"], e["args"]["bytes"]) for e in moved[:2]] == [("mortal sleep", gone), ("mortal wake", gone)]
    assert [e["args"]["why"] for e in moved] == ["asked for"] * 3
    assert [e["args"].get("kept awake") for e in moved] == [{"used by residents": 1 << 16}, None, None]
    slept = gone + (1 << 16)
    told = [e["args"]["mortal"] for e in events(path, "C")]
    assert told == [gone, gone, 0, 0, slept, slept, 0, 0]
    assert listening.told["mortal.end"].spans == listening.told["mortal.end"].raised == ()
    assert [rank for rank, _ in listening.told["mortal.end"].unfinished] == [0, 1]
    assert listening.told["mortal.behind"].ran == ()
    ran = sorted((e["name"], e["args"]["rank"]) for e in spans if e["name"] in ("mortal.end", "mortal.behind"))
    assert ran == [("mortal.end", 0), ("mortal.end", 1)]


def test_unfinished_trace_has_all_events(tmp_path: Path) -> None:
    """An unfinished trace has all events in its file, and lacks its end bracket only."""
    path = tmp_path / "trace.json"
    with colocate.connect() as runtime, runtime.reserve(2, cpus=0) as pool:
        trace = runtime.trace(path)
        spawned(pool)["one"].work()
        runtime._node.services.flush_observers()
        assert "one.work" in [event["name"] for event in json.loads(path.read_text() + "]")]
        pool.close()
    trace.close()
    assert [event["name"] for event in events(path, "i")][-1] == "group group is closed"
    trace.close()


def test_transfers_have_rows_and_byte_counts(tmp_path: Path) -> None:
    """Bytes from another worker have a row beside the slot's, and calls on the driver have byte counts."""
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
    placed = [e for e in events(path, "M") if e["name"] == "thread_sort_index"]
    beside = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in placed}
    assert sorted(beside, key=lambda row: beside[row]) == sorted(beside)
    names = [of[row].partition(" (")[0] for row in sorted(beside)]
    assert names == ["slot 0", "slot 0: from other workers", "slot 1"]
    driver = [(e["name"], e["args"]) for e in events(path, "b")]
    assert [name for name, _ in driver] == ["one.make", "both.size", "both.use", "both.size", "fetch of one.make"]
    sent, received = ([args.get(f"{what}_bytes", 0) >> 20 for _, args in driver] for what in ("sent", "received"))
    assert sent == [0, 0, 0, 2, 0]
    assert received == [0, 0, 1, 0, 1]


def test_overlapping_calls_have_separate_rows(tmp_path: Path) -> None:
    """Overlapping calls of async methods have a row each, which later calls use again."""
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
