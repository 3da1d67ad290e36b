"""A trace that torch's profiler has written, on its way into one file with those of other ranks.

It is read and written event by event: such a trace may have hundreds of megabytes.
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

from colocate._system.recent import Interval, merged, without
from colocate.features.profiling.collectives import Collectives
from colocate.features.profiling.messages import Meeting

CLOCK = "colocate.clock"
"""The range within which a worker looks at its clock: by that torch's clock is known in the worker's."""
_FLOWS = 1 << 40  # no rank has more flows
_CHUNK = 1 << 20
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_CLOCKS = re.compile(rb'"name": "colocate\.clock"[^{}]*?"ts": ([\d.]+),\s*"dur": ([\d.]+)')
_SPACE = re.compile(r"[\s,]*")
_COMMUNICATION = re.compile(r"nccl|rccl", re.IGNORECASE)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def events(file: IO[str]) -> Iterator[Any]:
    """Yield a trace's events.

    Raises:
        ValueError: It is no trace of torch's, or ends amid one.
    """
    text = ""
    while (found := _EVENTS.search(text)) is None:
        more = file.read(_CHUNK)
        if not more:
            raise ValueError("it has no traceEvents")
        text += more
    decoder, place = json.JSONDecoder(), found.end()
    while True:
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches anywhere
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
class Rank:
    """What becomes of a rank's trace.

    Attributes:
        index: Which one of the profiled ranks it is, of all groups: its flows get numbers by that.
        name: What its threads are called.
        process: The number of its group in the file.
        threads: Its threads have numbers from this one on, and at most so many.
        place: Where viewers have them among those of the process.
        clocks: When it looked at its own clock, in seconds: in each `CLOCK` range, half of them at the beginning.
        ahead: By how much its clock is ahead of the driver's, in seconds.
        zero: What is 0 in the file, in seconds of the driver's clock.
        pid: Its process.
        thread: The thread that runs its calls, as the system calls it.
    """

    index: int
    name: str
    process: int
    threads: tuple[int, int]
    place: int
    clocks: Sequence[float]
    ahead: float
    zero: float
    pid: int
    thread: int
    _tids: dict[Any, int] = attrs.field(factory=dict, init=False)

    def tid_of(self, pid: Any, tid: Any) -> int:
        """Return a number that no thread of another rank has."""
        first, most = self.threads
        if not self._tids:  # the one that runs calls is the first one
            self._tids[self.pid, self.thread] = first
        return self._tids.setdefault((pid, tid), first + min(len(self._tids), most - 1))


@attrs.define(eq=False)
class Read:
    """What was found in a trace, but for what the merged file gets; all times in seconds of the driver's clock."""

    events: int = 0
    compute: array[float] = attrs.field(factory=lambda: array("d"))  # of kernels and copies: start, end, ...
    exchange: list[tuple[str, float, float]] = attrs.field(factory=list)  # of kernels that communicate, by their group
    operations: array[float] = attrs.field(factory=lambda: array("d"))  # of the thread's operators: start, end, ...
    waited: list[Interval] = attrs.field(factory=list)  # from when to when that thread waited for one in C++
    # operations of process groups by their kinds: when each was begun, and whether that was in C++, which waits for it
    begun: dict[str, list[tuple[float, bool]]] = attrs.field(factory=dict)
    functional: list[Interval] = attrs.field(factory=list)  # of operators that begin one, and don't wait for it
    under_way: dict[str, list[Interval]] = attrs.field(factory=dict)  # by gloo's threads: from when to when


def convert(source: Path, target: IO[str], rank: Rank, noted: Collectives) -> Read:
    """Write the events of a rank's trace into a file, each after a comma and a line's end, and return what it has.

    Processes, threads and flows get numbers of their own, times are brought to the driver's clock. `noted` is in ns of
    the worker's clock.

    Raises:
        ValueError: It is no trace of torch's, or its clock isn't in there.
    """
    found = Read()
    shift = _shift(source, rank)
    # Whole ones: with other rounding than torch's, an operator within another one could begin before that does.
    shift_ns = round((shift - rank.zero) * 1e9)
    with source.open(encoding="utf-8", errors="replace") as file:
        inside = _Inside([(start / 1e9 - rank.ahead, end / 1e9 - rank.ahead) for _, start, end in noted.calls])
        for event in events(file):
            if "ts" not in event or isinstance(event.get("pid"), str) or event["name"].startswith("process_"):
                continue  # of the profiler itself; or of a process, which is one of the group here
            start = event["ts"] / 1e6 + shift
            if event["ph"] == "X":
                _look(event, start, rank, found, inside)
            _rename(event, rank)
            event["ts"] = 0 if event["ph"] == "M" else (round(event["ts"] * 1e3) + shift_ns) / 1e3
            target.write(",\n" + json.dumps(event))
            found.events += 1
    return found


def _shift(source: Path, rank: Rank) -> float:
    """Return what is to be added to a trace's times (in seconds) to have the driver's."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = sorted((float(each[1]), float(each[2])) for each in _CLOCKS.finditer(data))
    if len(found) != len(rank.clocks):
        raise ValueError(
            f"torch's profiler has {len(found)} ranges {CLOCK!r}, not {len(rank.clocks)}: it has lost some"
        )
    looks = [
        (length, mine - (start + length / 2) / 1e6) for mine, (start, length) in zip(rank.clocks, found, strict=True)
    ]
    half = len(looks) // 2
    # In the shortest range the look was nearest to the middle: a thread that is made to wait in one looks at any time.
    # Torch's own clock may be another one than Python's: whatever shifts this one shifts what calls say of themselves.
    return (min(looks[:half])[1] + min(looks[half:])[1]) / 2 - rank.ahead


def _look(event: Any, start: float, rank: Rank, found: Read, inside: _Inside) -> None:
    category, name, end = event.get("cat"), event["name"], start + event.get("dur", 0) / 1e6
    if category in _DEVICE:
        if category == "kernel" and _COMMUNICATION.search(name):
            args = event.get("args", {})
            # Of one name there may be several groups of different ranks: torch counts those that roles make.
            key = f"{args.get('Process Group Name', '')} {args.get('Process Group Ranks', '')}"
            between_two = f" of {rank.name}" if "SendRecv" in name else ""  # which has no number that others know
            found.exchange.append((key + between_two, start, end))
        else:
            found.compute.extend((start, end))
    elif category == "cpu_op" and event.get("tid") == rank.thread:
        found.operations.extend((start, end))
        if name.startswith("_c10d_functional::wait_tensor"):
            found.waited.append((start, end))
        elif name.startswith("_c10d_functional"):
            found.functional.append((start, end))
        elif name.startswith("c10d::"):
            found.begun.setdefault(_kind(name), []).append((start, not inside.has(start)))
    elif name.startswith("gloo:"):
        found.under_way.setdefault(_kind(name), []).append((start, end))


def _kind(name: str) -> str:
    """Return what an operation is called alike by torch's dispatcher and by gloo."""
    return name.partition(":")[2].replace(":", "").replace("_", "")


class _Inside:
    """Which of some intervals, that don't overlap and are in order, has a moment in it."""

    def __init__(self, intervals: list[Interval]) -> None:
        self._intervals = intervals
        self._starts = [start for start, _ in intervals]

    def has(self, moment: float) -> bool:
        index = bisect_right(self._starts, moment + _SLACK_S) - 1
        return index >= 0 and moment <= self._intervals[index][1] + _SLACK_S


_SLACK_S = 20e-6
"""Torch's clock and Python's are as near to each other."""


def _rename(event: Any, rank: Rank) -> None:
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


def waits(
    found: Read, noted: Collectives, rank: Rank
) -> tuple[dict[Meeting, float], list[tuple[Meeting, float, float]]]:
    """Return when a rank began each operation of process groups, and when nothing but such an operation went on there.

    That is where the thread that runs calls waits for one in Python; where one is under way that C++ has begun and
    waits for (DDP's in a backward pass), and the thread runs no operator; where of a device's kernels only such run.
    """
    arrived: dict[Meeting, float] = {}
    pieces: list[tuple[Meeting, float, float]] = []
    numbers: Counter[str] = Counter()

    def met(key: str, start: float) -> Meeting:
        """Return the next operation of a group, or of a kind, which begins now."""
        meeting = key, numbers[key]
        numbers[key] += 1
        arrived[meeting] = start
        return meeting

    for meeting, begun, _ in noted.calls:
        arrived[meeting] = begun / 1e9 - rank.ahead
    pieces += [(which or _UNKNOWN, t / 1e9 - rank.ahead, end / 1e9 - rank.ahead) for which, t, end in noted.waits]
    pieces += [(_UNKNOWN, start, end) for start, end in found.waited]
    computing = merged(zip(found.operations[::2], found.operations[1::2], strict=True))
    asynchronous = _Inside(sorted(found.functional))
    for kind, its in found.begun.items():
        under_way = sorted(found.under_way.get(kind, ()))
        if len(under_way) != len(its):  # on a device, or one was under way already
            continue
        for (start, by_c), (_, end) in zip(sorted(its), under_way, strict=True):
            if by_c and not asynchronous.has(start):
                meeting = met(f"C++ {kind}", start)
                pieces += [(meeting, first, last) for first, last in without([(start, end)], computing)]
    compute = merged(zip(found.compute[::2], found.compute[1::2], strict=True))
    for key, start, end in sorted(found.exchange, key=lambda each: each[1]):
        meeting = met(f"device {key}", start)
        pieces += [(meeting, first, last) for first, last in without([(start, end)], compute)]
    return arrived, sorted(pieces, key=lambda each: each[1:])


_UNKNOWN: Meeting = ("", -1)
"""An operation of which nothing is known."""
