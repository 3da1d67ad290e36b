"""Sampling of a worker's Python stacks by py-spy, a hundred times a second, for code without torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

import attrs

from colocate._system.deadline import Deadline
from colocate.errors import CapabilityError
from colocate.features.profiling.traces import RankTrace

_RATE = 100
_BEGINS_WITHIN_S = 30.0
_ENDS_WITHIN_S = 120.0
_SPIN_S, _SPINS = 0.035, 4


@attrs.define(eq=False)
class Sampler:
    """A py-spy process that samples this process from `start_sampling` to `stop_sampling`; called on the lane."""

    _file: Path  # The file that py-spy writes.
    clocks: list[float] = attrs.field(factory=list, init=False)  # Alternating starts and ends of `colocate_clock`.
    _process: subprocess.Popen[bytes] | None = attrs.field(default=None, init=False)

    def start_sampling(self) -> None:
        """Start py-spy, and wait until the sampling has begun.

        Raises:
            CapabilityError: There is no py-spy here, or it lacks the permission.
        """
        from colocate.keeper.outside import find_py_spy  # Imported here, because only the sampler needs psutil.

        if (program := find_py_spy()) is None:
            raise CapabilityError("there is no py-spy beside this worker's interpreter, nor on its path: install it")
        pid = str(os.getpid())
        how = ["--rate", str(_RATE), "--format", "chrometrace", "--nonblocking", "--idle", "--output", str(self._file)]
        # Sample times are relative to an unknown start, so `colocate_clock` must run after py-spy has begun.
        self._process = process = subprocess.Popen(
            [program, "record", "--pid", pid, *how],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, deadline = b"", Deadline(_BEGINS_WITHIN_S)
        assert process.stdout is not None
        while b"Sampling process" not in output:
            if not select.select([process.stdout], [], [], deadline.seconds_left)[0] or not (
                more := os.read(process.stdout.fileno(), 4096)
            ):
                self.stop_sampling()
                words = output.decode(errors="replace").strip() or "it says nothing"
                raise CapabilityError(f"py-spy can't sample process {pid}: {words}")
            output += more
        for _ in range(_SPINS):
            self.clocks += colocate_clock()
            time.sleep(_SPIN_S)

    def stop_sampling(self) -> None:
        """Stop py-spy, and wait until the output is written. A second call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=_ENDS_WITHIN_S)
            finally:
                process.kill()
                process.wait()

    def convert(self, target: IO[str], rank: RankTrace) -> int:
        """Write the samples as trace events into a file, and return the number of samples.

        Raises:
            ValueError: The samples lack the clock's marks.
        """
        samples: list[Any] = json.loads(self._file.read_text(encoding="utf-8", errors="replace"))
        marks = [
            sample["ts"] / 1e6
            for sample in samples
            if sample["name"] == colocate_clock.__name__ and sample["ph"] in "BE"
        ]
        if not marks:
            raise ValueError("py-spy has not seen the function by which its time is known: the machine is too busy")
        clocks = self.clocks
        if len(marks) != len(clocks):
            marks, clocks = [marks[0], marks[-1]], [clocks[0], clocks[-1]]
        # A sample shows a function's start or end up to one period late, so the smallest delay is the best estimate.
        late = min(sampled_at - mine for sampled_at, mine in zip(marks, clocks, strict=True))
        rank.thread = threading.get_ident()
        shift = -round((late + rank.offset + rank.start_time) * 1e6)
        names: dict[int, int] = {}
        for event in samples:
            if event["ph"] not in "BE":
                continue
            tid = rank.tid_of(rank.pid, event["tid"])
            names.setdefault(tid, event["tid"])
            event |= {"pid": rank.process, "tid": tid, "ts": max(0, event["ts"] + shift)}
            target.write(",\n" + json.dumps(event))
        for tid, thread in names.items():
            title = "stacks" if thread == rank.thread else f"stacks of thread {thread}"
            fields: dict[str, Any] = {"ts": 0, "ph": "M", "pid": rank.process, "tid": tid}
            for name, args in (("thread_name", f"{rank.name}: {title}"), ("thread_sort_index", rank.place)):
                key = "name" if name == "thread_name" else "sort_index"
                target.write(",\n" + json.dumps({**fields, "name": name, "args": {key: args}}))
        return len(samples)


def colocate_clock() -> tuple[float, float]:
    """Spin long enough for a sample by py-spy, and return the start and end time of this call."""
    began = time.time()
    until = time.monotonic() + _SPIN_S
    while time.monotonic() < until:
        pass
    return began, time.time()
