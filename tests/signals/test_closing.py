"""Closing in a signal's handler, whatever of colocate it has interrupted, with whatever locks held."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import colocate
from colocate import Runtime
from colocate.errors import ClosedError, ColocateError
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S

OWN = str(Path(colocate.__file__).parent)
STRIDE = 23
BOUND_S = 20.0  # a handler that waits for ever takes longer


def spawn(runtime: Runtime) -> None:
    runtime.reserve(1).spawn({"echo": colocate.role(Echo)})


def call(runtime: Runtime) -> None:
    for group in runtime.groups.values():  # none, where it has been closed already
        group.role("echo", Echo).first.keep(1).fetch()


class Interruption:
    """Closes a runtime when so many lines of colocate's have run on this thread, as a signal's handler would."""

    def __init__(self, runtime: Runtime, line: int) -> None:
        self.runtime = runtime
        self.left = line
        self.took_s: float | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                began = time.monotonic()
                with contextlib.suppress(ExceptionGroup):  # a worker that has not said yet what it is, say
                    self.runtime.close(grace=0.1)
                self.took_s = time.monotonic() - began
        return self


@pytest.mark.parametrize("action", [spawn, call])
def test_at_any_line(action: Callable[[Runtime], None]) -> None:
    """The close ends, and so does what it has interrupted, with an error or with its result."""
    line = 1
    while True:
        runtime = colocate.connect("local", processes=False)
        if action is call:
            spawn(runtime)
        interruption = Interruption(runtime, line)
        tracer = sys.gettrace()
        sys.settrace(interruption)
        try:
            action(runtime)
        except ColocateError:
            pass
        finally:
            sys.settrace(tracer)
        if interruption.took_s is None:
            runtime.close()
            assert line > 5 * STRIDE, "nothing was interrupted"
            return
        assert interruption.took_s < BOUND_S, f"line {line}"
        waiter = threading.Thread(target=runtime._node.life.wait_closed, daemon=True)
        waiter.start()
        waiter.join(PATIENCE_S)
        assert runtime.state == "closed", f"line {line}"
        line += STRIDE


def test_while_a_result_is_waited_for() -> None:
    """The usual moment: nothing is held, so everything is closed when the handler returns, and its errors are there."""
    seen: list[Any] = []

    def close(number: int, frame: FrameType | None) -> None:
        try:
            runtime.close(grace=0.1)
        except ExceptionGroup as group:
            seen.extend([str(group.exceptions[0]), runtime.state])

    before = signal.signal(signal.SIGUSR1, close)
    try:
        with Gate() as gate:
            runtime = colocate.connect("local", processes=True)
            group = runtime.reserve(1).spawn({"faulty": colocate.role(Faulty)})
            hung = group.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for()
            main = threading.main_thread().ident
            assert main is not None
            threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1)).start()
            with pytest.raises(ClosedError):
                hung.result(PATIENCE_S)
        assert "did not end within 0.1 s" in seen[0]
        assert seen[1] == "closed"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_during_another_close() -> None:
    """A second close, by a handler that interrupts the first one, doesn't wait for it."""
    took: list[float] = []

    def close(number: int, frame: FrameType | None) -> None:
        began = time.monotonic()
        runtime.close()
        took.append(time.monotonic() - began)

    before = signal.signal(signal.SIGUSR1, close)
    try:
        with Gate() as gate:
            runtime = colocate.connect("local", processes=True)
            group = runtime.reserve(1).spawn({"faulty": colocate.role(Faulty)})
            group.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for()
            main = threading.main_thread().ident
            assert main is not None
            threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGUSR1)).start()
            with pytest.raises(ExceptionGroup, match="gone wrong"):
                runtime.close(grace=1.0)
        assert runtime.state == "closed"
        assert [seconds for seconds in took if seconds > BOUND_S] == []
        assert len(took) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
