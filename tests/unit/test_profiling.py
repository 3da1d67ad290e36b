"""Profiles, on constructed traces and times with known results, also for GPUs that this machine lacks."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import colocate
from colocate.errors import CapabilityError, ConfigError
from colocate.features.looking.idle import TimedCall
from colocate.features.profiling import traces
from colocate.features.profiling.collectives import CollectiveRecorder
from colocate.features.profiling.messages import Meeting
from colocate.features.profiling.parts import LAST, Part, format_rows
from colocate.features.profiling.traces import CLOCK, RankTrace, TraceSummary, convert_trace, find_waits, read_events
from colocate_run.profiling import ProfileRequest

A, B = ("policy", 0), ("policy", 1)


def call(label: str, start: float, end: float, slot: tuple[str, int] = A) -> TimedCall:
    return TimedCall(label, start, start, {slot: (start, end)})


def test_a_table() -> None:
    parts = {"a.run": Part(2, {"compute": 1.0, "for others": 0.5}), LAST: Part(0, {"for the driver": 0.25})}
    *_, last = format_rows(parts, 2)
    assert last == {
        "call": "all",
        "calls": 2,
        "time (s)": 0.875,
        "compute (s)": 0.5,
        "communication (s)": 0.0,
        "waits for others (s)": 0.25,
        "waits for the driver (s)": 0.125,
    }


def event(name: str, start: float, end: float, cat: str = "cpu_op", tid: Any = 7, pid: Any = 50, **args: Any) -> Any:
    """Make a trace event of torch, whose clock is 100 s ahead of Python's."""
    times = {"ts": (start + 100.0) * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}


LOOKS = (0.0, 1.0, 9.0, 10.0)


def written(folder: Path, found: list[Any]) -> Path:
    # A long range means that its thread waited, before or after the read of its clock.
    before, after = (4e-3, 1e-5, 1e-5, 1e-5), (1e-5, 1e-5, 1e-5, 1e-3)
    looks = zip(LOOKS, before, after, strict=True)
    clocks = [event(CLOCK, at - early, at + late, "user_annotation") for at, early, late in looks]
    text = json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 5, "traceEvents": [*clocks, *found]}, indent=1)
    path = folder / "trace.json"
    path.write_text(text)
    return path


def converted(path: Path, noted: CollectiveRecorder, index: int = 0) -> tuple[list[Any], TraceSummary, RankTrace]:
    """Convert a worker's trace; its clock is 3 s ahead of the driver's, and 0 in the file is the driver's second 1."""
    clocks, threads = [at + 3.0 for at in LOOKS], (100 * index, 50)
    rank = RankTrace(index, f"slot {index}", 2, threads, index, clocks, offset=3.0, start_time=1.0, pid=50, thread=7)
    target = io.StringIO()
    found = convert_trace(path, target, rank, noted)
    return json.loads("[" + target.getvalue().lstrip(",\n") + "]"), found, rank


@pytest.mark.parametrize("chunk", [1, 17, 1 << 20])
def test_a_trace_is_read_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """A trace is parsed alike wherever a chunk ends; a truncated trace raises ValueError."""
    monkeypatch.setattr(traces, "_CHUNK", chunk)
    wanted = [event(f'a "name" ] }} {number}', number, number + 0.5) for number in range(20)]
    path = written(tmp_path, wanted)
    with path.open() as file:
        assert list(read_events(file))[len(LOOKS) :] == wanted
    path.write_text(path.read_text()[:-60])
    with path.open() as file, pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        list(read_events(file))


def test_trace_without_clock_is_refused(tmp_path: Path) -> None:
    """A trace that lacks a clock range is refused: its times mean nothing."""
    path = written(tmp_path, [])
    path.write_text(path.read_text().replace(CLOCK, "another", 1))
    with pytest.raises(ValueError, match=r"has 3 ranges 'colocate\.clock', not 4"):
        converted(path, CollectiveRecorder())


def nccl(start: float, end: float, group: str = "0", kind: str = "AllReduce") -> Any:
    args = {"Process Group Name": group, "Process Group Ranks": "[0, 1]"}
    return event(f"ncclDevKernel_{kind}_Sum_f32_RING_LL", start, end, "kernel", tid=20, pid=0, **args)


def found_in(folder: Path, found: list[Any], noted: CollectiveRecorder | None = None) -> tuple[Any, list[Any]]:
    noted = noted or CollectiveRecorder()
    _, read, rank = converted(written(folder, found), noted)
    return find_waits(read, noted, rank)


def test_kernels_that_communicate(tmp_path: Path) -> None:
    """Communication counts only while no other kernel runs, and a device copy counts as such a kernel."""
    kernels = [event("gemm", 1.0, 2.0, "kernel", pid=0), event("Memcpy DtoD", 2.5, 3.0, "gpu_memcpy", pid=0)]
    arrived, pieces = found_in(tmp_path, [nccl(1.5, 4.0), *kernels, nccl(5.0, 6.0), nccl(5.0, 5.5, "1")])
    first: Meeting = ("device 0 [0, 1]", 0)
    assert arrived[first] == pytest.approx(1.5)
    assert [(each[0], round(each[1], 4), round(each[2], 4)) for each in pieces] == [
        (first, 2.0, 2.5),
        (first, 3.0, 4.0),
        (("device 1 [0, 1]", 0), 5.0, 5.5),
        (("device 0 [0, 1]", 1), 5.0, 6.0),
    ]


def test_device_sends_match_no_other_rank(tmp_path: Path) -> None:
    """A device's send is matched with no other rank's: no number identifies it on both ranks."""
    arrived, _ = found_in(tmp_path, [nccl(1.0, 2.0, kind="SendRecv")])
    assert [*arrived] == [("device 0 [0, 1] of slot 0", 0)]


def test_valid_profile_options_are_parsed() -> None:
    assert ProfileRequest.parse("steps=3:5,roles=actor") == ProfileRequest(3, 5, ("actor",))
    assert ProfileRequest.parse("py-spy,roles=reward") == ProfileRequest(0, sys.maxsize, ("reward",), sampler="py-spy")
    assert ProfileRequest.parse("steps=3:5,py-spy") == ProfileRequest(3, 5, sampler="py-spy")
    assert ProfileRequest.parse("steps=3,roles=actor,critic,ranks=0,1,memory") == ProfileRequest(
        3, 3, ("actor", "critic"), (0, 1), True
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "says nothing"),
        ("roles=actor", "steps and ranks are whole numbers"),
        ("steps=a:b", "whole numbers"),
        ("steps=5:3", "the first step comes after the last one"),
        ("steps=1,steps=2", "'steps' is twice"),
        ("step=1", "'step' is unknown.*steps"),
        ("steps=1,ranks=all", "whole numbers"),
        ("steps=1,actor", "'actor' says nothing"),
    ],
)
def test_invalid_profile_options_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ProfileRequest.parse(text)


class Source(colocate.Role):
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(4)

    @colocate.method
    def rest(self) -> None: ...


class Target(colocate.Role):
    def load_weights(self, weights: colocate.Weights, version: int) -> None:
        for _ in weights:
            time.sleep(0.1)

    @colocate.method
    def rest(self) -> None: ...


def test_a_sync_of_weights_is_communication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    roles: dict[str, Any] = {"source": colocate.role(Source), "target": colocate.role(Target)}
    with colocate.spawn(roles, executor="local", processes=True) as group, colocate.profile(group) as profile:
        colocate.sync_weights(group.role("source"), group.role("target"))
    part = profile.parts["the sync of weights"]
    assert 0.1 <= part.seconds["communication"] < 0.5
    assert "compute" not in part.seconds


class Still(colocate.Role):
    @colocate.method
    def rest(self) -> None: ...


def test_threads_cant_be_profiled() -> None:
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"still": colocate.role(Still)})
        with pytest.raises(CapabilityError, match=r"connect\(processes=True\)"), colocate.profile(group):
            raise AssertionError
        group.role("still", Still).rest()
