"""verl's own callers on colocate's worker groups, beside its own `RayWorkerGroup`.

verl lives in an environment of its own (`make bench` makes it; VERL_PYTHON names its interpreter): without it there is
nothing to measure.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from tests.bench.measure import Rounds, asking
from tests.bench.rows import Row

from colocate.testing.waiting import Processes

_PART = "verl 0.9.1's callers, 2 workers on Ray"
_PROGRAM = Path(__file__).with_name("verl_groups.py")
_ROWS, _COLUMNS = 4096, 4096
_CALLS = {"nothing": ("a call of nothing", 0.3), "call": ("a call with 64 MB", 0.2), "chain": ("7 calls on 64 MB", 0.2)}
_ROUNDS = 5


def rows() -> Iterator[Row]:
    python = os.environ.get("VERL_PYTHON")
    if python is None:
        return
    command = [python, "-W", "ignore", str(_PROGRAM), str(_ROWS), str(_COLUMNS)]
    with asking(command, COLOCATE_VERL="") as its, asking(command, COLOCATE_VERL="ray") as ours:
        for name, (what, bar) in _CALLS.items():
            found = [(float(its(name)), float(ours(name))) for _ in range(_ROUNDS + 1)][1:]
            theirs, mine = (Rounds(each) for each in zip(*found, strict=True))
            yield Row(_PART, f"{what}, verl's", theirs.least * 1e3, "ms")
            yield Row(_PART, f"{what}, colocate's", mine.least * 1e3, "ms")
            yield Row(_PART, f"{what}, colocate's to verl's", mine.over(theirs), "x", bar)
        what = "SIGKILL of a worker to the error in a waiting call"
        yield Row(_PART, f"{what}, verl's", float(its("death")) * 1e3, "ms")
        yield Row(_PART, f"{what}, colocate's", float(ours("death")) * 1e3, "ms", 100.0)
    # verl's isn't measured: some of its driver's processes, Ray included, still ran after a minute.
    yield Row(_PART, "SIGKILL of the driver to no worker left, colocate's", _driver_killed(command) * 1e3, "ms", 2000.0)


def _driver_killed(command: Sequence[str]) -> float:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {**os.environ, "COLOCATE_VERL": "ray"}
    with subprocess.Popen(command, env=env, text=True, **pipes) as driver:  # type: ignore[call-overload]
        print("nothing", file=driver.stdin, flush=True)
        assert driver.stdout.readline()
        below = psutil.Process(driver.pid).children(recursive=True)
        with Processes(each.pid for each in below if "colocate.worker" in each.cmdline()) as workers:
            began = time.perf_counter()
            driver.kill()
            workers.wait_all()
            return time.perf_counter() - began
