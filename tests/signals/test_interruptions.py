"""Ctrl-C at random moments of spawn, call, stream and close, on each executor, leaves no group and harms no other."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
from tests.conformance.shared import cluster
from tests.signals.program import Adder, nothing_more_than, view, what_is_there

import colocate
from colocate import Runtime

TRIALS = 200
LOCAL: dict[str, dict[str, Any]] = {"threads": {}, "processes": {"processes": True}}


def is_interrupted(seconds: float, work: Callable[[], object]) -> bool:
    """Run work, and raise KeyboardInterrupt in it after a time; return whether the work was interrupted."""
    is_over = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident or 0, signal.SIGUSR1))
    try:
        try:
            timer.start()  # The signal may come before this returns.
            work()
        finally:
            is_over = True
    except KeyboardInterrupt:
        return True
    finally:
        is_over = True
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        time.sleep(0)  # A pending signal is handled before its handler is removed.
        signal.signal(signal.SIGUSR1, before)
    return False


def use(runtime: Runtime) -> None:
    with runtime.reserve(1, cpus=0) as pool, pool.spawn({"adder": colocate.role(Adder)}) as group:
        assert view(group).add(1, 2) == 3
        with group.scope(), view(group).add.keep(1, 2) as kept:
            assert kept.fetch() == 3
        assert sorted(view(group).twice.stream([1, 2, 3])) == [(0, 2), (1, 4), (2, 6)]


def duration(runtime: Runtime) -> float:
    """Return the seconds that one use takes."""
    began = time.monotonic()
    use(runtime)
    return time.monotonic() - began


@pytest.fixture(scope="module", params=[*LOCAL, "ray", "dask"])
def connection(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Yield the executor's name and the options for `connect`."""
    engine: str = request.param
    if engine in LOCAL:
        yield {"executor": "local", **LOCAL[engine]}
    else:
        with cluster(engine) as options:
            yield {"executor": engine, **options}


@pytest.mark.long
def test_ctrl_c(connection: dict[str, Any]) -> None:
    rnd = random.Random(7)
    with colocate.connect(**connection) as runtime:
        bystander = view(runtime.reserve(1, cpus=0).spawn({"adder": colocate.role(Adder)}, "bystander"))
        use(runtime)  # The first use imports modules, and takes longer.
        takes = min(duration(runtime) for _ in range(3))
        before = what_is_there()
        interrupted = 0
        for _ in range(TRIALS):
            interrupted += is_interrupted(rnd.uniform(0, 1.2 * takes), partial(use, runtime))
            assert bystander.add(2, 3) == 5
            assert list(runtime.groups) == ["bystander"]
            assert not runtime.audit()
        if connection["executor"] == "local":
            nothing_more_than(before)
        assert interrupted > TRIALS / 3
