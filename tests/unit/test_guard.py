"""A signal handler in a driver runs at once in users' code and in waits, and after core's own code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import pytest

import colocate
from colocate import First, Role, method
from colocate._signals import guard
from colocate.testing.waiting import PATIENCE_S, wait_until


class Echo(Role):
    @method(collect=First())
    def echo(self, value: Any) -> Any:
        return value

    @method(collect=First())
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class Interruption(Exception):
    """The exception that a handler raises."""


Set = Callable[[Callable[[int, FrameType | None], object]], None]


@pytest.fixture
def handler() -> Iterator[Set]:
    """Set a handler of SIGUSR1 for one test, in a process that has no runtime: other tests' runtimes don't count."""
    others = guard.connected_runtimes.copy()
    guard.connected_runtimes.clear()
    guard.stop_guard()
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda function: void(signal.signal(signal.SIGUSR1, function))
    signal.signal(signal.SIGUSR1, before)
    guard.connected_runtimes.update(others)
    if others:
        guard.start_guard()


def void(_: object) -> None:
    """Drop a value."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interruption


def send() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def test_handlers_of_before_and_of_later_are_guarded_and_come_back(handler: Set) -> None:
    """Earlier and later handlers are guarded and restored, also where `signal.signal` was replaced by the host."""
    ours, asked = signal.signal, list[int]()

    def of_the_host(number: Any, function: Any) -> Any:
        asked.append(number)
        return ours(number, function)

    handler(interrupt)
    signal.signal = of_the_host  # type: ignore[assignment]
    try:
        with colocate.connect():
            assert signal.getsignal(signal.SIGUSR1) is interrupt
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert type(guard._get(signal.SIGUSR1)) is type(guard._get(signal.SIGINT)) is guard._Guarded
            asked.clear()
            handler(lambda number, frame: None)
            assert type(guard._get(signal.SIGUSR1)) is guard._Guarded
            assert asked == [signal.SIGUSR1]
            handler(interrupt)
        assert signal.signal is of_the_host
    finally:
        signal.signal = ours
    assert signal.getsignal(signal.SIGUSR1) is interrupt
    assert not isinstance(signal.getsignal(signal.SIGINT), guard._Guarded)


def test_guard_stays_until_last_runtime_closes(handler: Set) -> None:
    handler(interrupt)
    first = colocate.connect()
    with colocate.connect():
        first.close()
        assert isinstance(guard._get(signal.SIGUSR1), guard._Guarded)
    assert guard._get is signal.getsignal
    assert signal.getsignal(signal.SIGUSR1) is interrupt


def test_handler_is_deferred_in_core_code(handler: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler amid core's own code runs after that has sent the whole call."""
    with colocate.spawn({"echo": colocate.role(Echo)}) as group:
        echo = group.role("echo")
        order, ran = group._node.order, list[str]()
        enter = order.enqueue_call

        def interrupted(call: Any) -> int:
            seq = enter(call)
            send()
            ran.append("sent")
            return seq

        handler(lambda number, frame: ran.append("handled"))
        monkeypatch.setattr(order, "enqueue_call", guarded(interrupted))
        call = echo.echo.submit(1)
        monkeypatch.undo()
        wait_until(lambda: "handled" in ran, "the handler has run")
        assert ran == ["sent", "handled"]
        assert call.result() == 1


def guarded(function: Any) -> Any:
    """Return a function with the same code, which counts as core's own."""
    code = function.__code__.replace(co_filename=guard.__file__)
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def test_handler_in_wait_runs_and_calls(handler: Set) -> None:
    """A handler in a wait runs at once, may submit a call, and ends the wait by an exception."""
    with colocate.spawn({"echo": colocate.role(Echo)}) as group:
        echo, sent = group.role("echo"), list[Any]()

        def submit_and_raise(number: int, frame: FrameType | None) -> None:
            sent.append(echo.echo.submit("by the handler"))
            raise Interruption

        handler(submit_and_raise)
        threading.Timer(0.1, send).start()
        began = time.monotonic()
        with pytest.raises(Interruption):
            echo.nap(2.0)
        assert time.monotonic() - began < 2.0
        assert sent[0].result(PATIENCE_S) == "by the handler"


def test_handler_runs_late_in_hanging_core(handler: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler still runs, if late, where core's own code hangs."""
    monkeypatch.setattr(guard, "AT_LATEST_S", 0.2)
    lock = threading.Lock()

    def hang() -> None:
        send()
        lock.acquire()

    with colocate.connect(), lock:
        handler(interrupt)
        with pytest.raises(Interruption):
            guarded(hang)()


class Slow:
    """A value that takes long to pickle the first time, and is interrupted then."""

    is_first = True

    def __reduce__(self) -> Any:
        if Slow.is_first:
            Slow.is_first = False
            send()
            time.sleep(PATIENCE_S)
        return Slow, ()


def test_packing_is_interrupted(handler: Set) -> None:
    handler(interrupt)
    with colocate.spawn({"echo": colocate.role(Echo)}, strict=True) as group:
        echo, began = group.role("echo", Echo), time.monotonic()
        with pytest.raises(Interruption):
            echo.echo(Slow())
        assert time.monotonic() - began < PATIENCE_S
        assert echo.echo(1) == 1


@pytest.mark.parametrize("processes", [False, True])
def test_hundreds_of_alarms(handler: Set, processes: bool) -> None:
    """Hundreds of signals change no call's value, and leave no call pending."""
    count = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    with colocate.spawn({"echo": colocate.role(Echo)}, processes=processes) as group:
        echo, sent = group.role("echo", Echo), 0
        before = signal.signal(signal.SIGPROF, note)
        signal.setitimer(signal.ITIMER_PROF, 0.0005, 0.0005)
        try:
            while count < 300:
                assert echo.echo(sent) == sent
                sent += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        assert not group._node.order.pending


def test_forked_child_runs_handlers_at_once() -> None:
    """A child that the driver forks isn't a driver: a handler runs in it at once."""
    code = """
        import os, signal, colocate
        ran = []
        signal.signal(signal.SIGUSR1, lambda number, frame: ran.append(number))
        with colocate.connect():
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGUSR1)
                os._exit(0 if ran else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=os.environ)
    assert (done.stdout, done.stderr) == ("0\n", "")
