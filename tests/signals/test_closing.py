"""A signal handler can close the runtime while it interrupts a wait for a result, or another close."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import colocate
from colocate import Call, Runtime
from colocate.errors import ClosedError
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.waiting import PATIENCE_S

BOUND_S = 20.0  # a handler that waits for ever takes longer


@contextmanager
def hanging(handler: Callable[[Runtime], None], after_s: float) -> Iterator[tuple[Runtime, Call[Any]]]:
    """Run a block beside a call that hangs; `after_s` seconds later a signal's handler interrupts the block."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handler(runtime))
    try:
        with Gate() as gate:
            runtime = colocate.connect("local", processes=True)
            group = runtime.reserve(1).spawn({"faulty": colocate.role(Faulty)})
            hung = group.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for()
            main = threading.main_thread().ident
            assert main is not None
            threading.Timer(after_s, signal.pthread_kill, (main, signal.SIGUSR1)).start()
            yield runtime, hung
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_while_a_result_is_waited_for() -> None:
    """A close in a handler that interrupts `result` is complete at its return, raises its errors, and ends the wait."""
    seen: list[Any] = []

    def close(runtime: Runtime) -> None:
        try:
            runtime.close(grace=0.1)
        except ExceptionGroup as group:
            seen.extend([str(group.exceptions[0]), runtime.state])

    with hanging(close, 0.05) as (_, hung), pytest.raises(ClosedError):
        hung.result(PATIENCE_S)
    assert "did not end within 0.1 s" in seen[0]
    assert seen[1] == "closed"


def test_during_another_close() -> None:
    """A close in a handler that interrupts another close doesn't wait for the other one for ever."""
    took: list[float] = []

    def close(runtime: Runtime) -> None:
        began = time.monotonic()
        runtime.close()
        took.append(time.monotonic() - began)

    with hanging(close, 0.3) as (runtime, _), pytest.raises(ExceptionGroup, match="closed with errors"):
        runtime.close(grace=1.0)
    assert runtime.state == "closed"
    assert [seconds for seconds in took if seconds > BOUND_S] == []
    assert len(took) == 1
