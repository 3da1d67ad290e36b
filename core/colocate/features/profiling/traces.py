"""Converts one rank's trace of torch's profiler for the file in which all ranks' traces are merged.

A trace is read and written event by event, because it may have hundreds of megabytes.
"""

from __future__ import annotations

import json
import mmap
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import attrs

from colocate._system.recent import Interval, merge_intervals, subtract_intervals
from colocate.features.profiling.collectives import CollectiveRecorder
from colocate.features.profiling.messages import Meeting

CLOCK = "colocate.clock"
"""The name of a range in which a worker reads the clock, so that torch's clock can be compared with the worker's."""
_FLOWS = 1 << 40  # No rank's trace has this many flow events (arrows).
_CHUNK = 1 << 20
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_CLOCKS = re.compile(rb'"name": "colocate\.clock"[^{}]*?"ts": ([\d.]+),\s*"dur": ([\d.]+)')
_SPACE = re.compile(r"[\s,]*")
_COMMUNICATION = re.compile(r"nccl|rccl", re.IGNORECASE)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def read_events(file: IO[str]) -> Iterator[Any]:
    """Yield the events of a trace file, one after the other.

    Raises:
        ValueError: The file is no trace of torch's, or is cut off.
    """
    text = ""
    while (match := _EVENTS.search(text)) is None:
        more = file.read(_CHUNK)
        if not more:
            raise ValueError("it has no traceEvents")
        text += more
    decoder, place = json.JSONDecoder(), match.end()
    while True:
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # the pattern always matches
        if text[place : place + 1] == "]":
            return
        try:
            event, place = decoder.raw_decode(text, place)
        except ValueError:
            more = file.read(_CHUNK)
            if not more:
                raise
            text, place = text[place:] + more, 0
        else:
            yield event
        if place > _CHUNK:
            text, place = text[place:], 0


@attrs.define(eq=False)
class RankTrace:
    """The settings for converting one rank's trace for the merged file.

    Attributes:
        index: The index among the profiled ranks of all groups: the base of the rank's flow numbers.
        name: The prefix of thread names.
        process: The number of the rank's group in the file.
        threads: The first number for the rank's threads, and their maximal count.
        place: The position among the threads of the process in viewers.
        clocks: The worker's time in each `CLOCK` range, in seconds; half of the ranges lie at the beginning.
        offset: How many seconds the worker's clock is ahead of the driver's clock.
        start_time: The time that becomes 0 in the file, in seconds of the driver's clock.
        pid: The worker's process.
        thread: The native id of the thread that runs calls.
    """

    index: int
    name: str
    process: int
    threads: tuple[int, int]
    place: int
    clocks: Sequence[float]
    offset: float
    start_time: float
    pid: int
    thread: int
    _tids: dict[Any, int] = attrs.field(factory=dict, init=False)

    def tid_of(self, pid: Any, tid: Any) -> int:
        """Return a thread's number in the merged file, unique among all ranks."""
        first, most = self.threads
        if not self._tids:  # The thread that runs calls gets the first number.
            self._tids[self.pid, self.thread] = first
        return self._tids.setdefault((pid, tid), first + min(len(self._tids), most - 1))


@attrs.define(eq=False)
class TraceSummary:
    """The intervals found in a rank's trace during the conversion. All times are in seconds of the driver's clock."""

    events: int = 0
    compute: array[float] = attrs.field(factory=lambda: array("d"))  # Alternating starts and ends: kernels and copies.
    # Communication kernels, each with a key of the process group, the start and the end.
    exchange: list[tuple[str, float, float]] = attrs.field(factory=list)
    # Alternating starts and ends of operators on the thread that runs calls.
    operations: array[float] = attrs.field(factory=lambda: array("d"))
    waits: list[Interval] = attrs.field(factory=list)  # Waits in C++ of the thread that runs calls.
    # Operations on process groups, by kind, with the start and whether C++ (and not Python) started the operation.
    starts: dict[str, list[tuple[float, bool]]] = attrs.field(factory=dict)
    functional: list[Interval] = attrs.field(factory=list)  # Operators that start an operation without awaiting it.
    under_way: dict[str, list[Interval]] = attrs.field(factory=dict)  # Operations on gloo's threads, by kind.


def convert_trace(source: Path, target: IO[str], rank: RankTrace, noted: CollectiveRecorder) -> TraceSummary:
    """Copy the events of a rank's trace into a file, and return the intervals that were found.

    Each event is written after a comma and a newline. Processes, threads and flows get new numbers, and times are
    converted to the driver's clock. `noted` is in ns of the worker's clock.

    Raises:
        ValueError: The file is no trace of torch's, or lacks the clock's ranges.
    """
    result = TraceSummary()
    shift = _clock_shift(source, rank)
    # Shift by whole nanoseconds, because other rounding could let an inner operator begin before the outer one.
    shift_ns = round((shift - rank.start_time) * 1e9)
    with source.open(encoding="utf-8", errors="replace") as file:
        inside = _IntervalSet([(start / 1e9 - rank.offset, end / 1e9 - rank.offset) for _, start, end in noted.calls])
        for event in read_events(file):
            if "ts" not in event or isinstance(event.get("pid"), str) or event["name"].startswith("process_"):
                continue  # Skip events of the profiler, and process names, which the merged file has per group.
            start = event["ts"] / 1e6 + shift
            if event["ph"] == "X":
                _classify_event(event, start, rank, result, inside)
            _rename_ids(event, rank)
            event["ts"] = 0 if event["ph"] == "M" else (round(event["ts"] * 1e3) + shift_ns) / 1e3
            target.write(",\n" + json.dumps(event))
            result.events += 1
    return result


def _clock_shift(source: Path, rank: RankTrace) -> float:
    """Return the seconds to add to the times of a trace to get times of the driver's clock."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        ranges = sorted((float(match[1]), float(match[2])) for match in _CLOCKS.finditer(data))
    if len(ranges) != len(rank.clocks):
        raise ValueError(
            f"torch's profiler has {len(ranges)} ranges {CLOCK!r}, not {len(rank.clocks)}: it has lost some"
        )
    looks = [
        (length, mine - (start + length / 2) / 1e6) for mine, (start, length) in zip(rank.clocks, ranges, strict=True)
    ]
    half = len(looks) // 2
    # Use each half's shortest range, because preemption makes it uncertain when in a range the clock was read.
    return (min(looks[:half])[1] + min(looks[half:])[1]) / 2 - rank.offset


def _classify_event(event: Any, start: float, rank: RankTrace, found: TraceSummary, inside: _IntervalSet) -> None:
    category, name, end = event.get("cat"), event["name"], start + event.get("dur", 0) / 1e6
    if category in _DEVICE:
        if category == "kernel" and _COMMUNICATION.search(name):
            args = event.get("args", {})
            # Process groups of different ranks may have the same name, because each process numbers its own groups.
            key = f"{args.get('Process Group Name', '')} {args.get('Process Group Ranks', '')}"
            # Other ranks don't know the number of a point-to-point kernel, so the key contains this rank's name.
            between_two = f" of {rank.name}" if "SendRecv" in name else ""
            found.exchange.append((key + between_two, start, end))
        else:
            found.compute.extend((start, end))
    elif category == "cpu_op" and event.get("tid") == rank.thread:
        found.operations.extend((start, end))
        if name.startswith("_c10d_functional::wait_tensor"):
            found.waits.append((start, end))
        elif name.startswith("_c10d_functional"):
            found.functional.append((start, end))
        elif name.startswith("c10d::"):
            found.starts.setdefault(_operation_kind(name), []).append((start, not inside.contains(start)))
    elif name.startswith("gloo:"):
        found.under_way.setdefault(_operation_kind(name), []).append((start, end))


def _operation_kind(name: str) -> str:
    return name.partition(":")[2].replace(":", "").replace("_", "")


class _IntervalSet:
    def __init__(self, intervals: list[Interval]) -> None:
        self._intervals = intervals
        self._starts = [start for start, _ in intervals]

    def contains(self, moment: float) -> bool:
        index = bisect_right(self._starts, moment + _SLACK_S) - 1
        return index >= 0 and moment <= self._intervals[index][1] + _SLACK_S


_SLACK_S = 20e-6
"""The maximal difference between torch's clock and Python's clock, in seconds."""


def _rename_ids(event: Any, rank: RankTrace) -> None:
    pid = event.get("pid")
    event["pid"], event["tid"] = rank.process, rank.tid_of(pid, event.get("tid"))
    if "id" in event:
        event["id"] = rank.index * _FLOWS + int(str(event["id"]), 0) % _FLOWS
    args = event.get("args")
    if event["ph"] == "M" and args:
        if event["name"] == "thread_name":
            device = "" if pid == rank.pid else f" GPU {pid}"
            args["name"] = f"{rank.name}{device}: {args['name']}"
        elif event["name"] == "thread_sort_index":
            args["sort_index"] = rank.place


def find_waits(
    found: TraceSummary, noted: CollectiveRecorder, rank: RankTrace
) -> tuple[dict[Meeting, float], list[tuple[Meeting, float, float]]]:
    """Return the start of each operation on process groups, and the intervals in which the rank did nothing else.

    Such an interval is a wait in Python of the thread that runs calls; an operation started and awaited by C++ (DDP's
    in a backward pass) while the thread runs no operator; or a time when a device runs only communication kernels.
    """
    arrived: dict[Meeting, float] = {}
    pieces: list[tuple[Meeting, float, float]] = []
    numbers: Counter[str] = Counter()

    def met(key: str, start: float) -> Meeting:
        meeting = key, numbers[key]
        numbers[key] += 1
        arrived[meeting] = start
        return meeting

    for meeting, begun, _ in noted.calls:
        arrived[meeting] = begun / 1e9 - rank.offset
    pieces += [(which or _UNKNOWN, t / 1e9 - rank.offset, end / 1e9 - rank.offset) for which, t, end in noted.waits]
    pieces += [(_UNKNOWN, start, end) for start, end in found.waits]
    computing = merge_intervals(zip(found.operations[::2], found.operations[1::2], strict=True))
    asynchronous = _IntervalSet(sorted(found.functional))
    for kind, starts in found.starts.items():
        under_way = sorted(found.under_way.get(kind, ()))
        if len(under_way) != len(starts):  # The operations ran on a device, or one began before the profile.
            continue
        for (start, by_c), (_, end) in zip(sorted(starts), under_way, strict=True):
            if by_c and not asynchronous.contains(start):
                meeting = met(f"C++ {kind}", start)
                pieces += [(meeting, first, last) for first, last in subtract_intervals([(start, end)], computing)]
    compute = merge_intervals(zip(found.compute[::2], found.compute[1::2], strict=True))
    for key, start, end in sorted(found.exchange, key=lambda each: each[1]):
        meeting = met(f"device {key}", start)
        pieces += [(meeting, first, last) for first, last in subtract_intervals([(start, end)], compute)]
    return arrived, sorted(pieces, key=lambda each: each[1:])


_UNKNOWN: Meeting = ("", -1)
"""The id of an operation that isn't known."""
