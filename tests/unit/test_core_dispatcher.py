"""The dispatcher: callbacks that misbehave or come late."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import pytest

import colocate
from colocate import ClosedError, Role, WorkerDied, method
from colocate._owned import dispatcher as dispatchers
from colocate._owned.dispatcher import Dispatcher
from colocate._system import jobs
from colocate.testing.gate import Address, Gate, pass_gate
from colocate.testing.waiting import PATIENCE_S


class Echo(Role):
    @method
    def wait(self, gate: Address) -> int:
        pass_gate(gate)
        return 1

    @method
    def one(self) -> int:
        return 1


class Result:
    """Something that can be seen to go."""


class Maker(Role):
    @method
    def make(self) -> Result:
        return Result()


def test_gathered_jobs_come_before_what_is_given_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later job, and the end of the thread, have them run first; after that end they run at once."""
    monkeypatch.setattr(dispatchers, "TOLD_TOGETHER_S", 10 * PATIENCE_S)
    dispatcher = Dispatcher("test")
    ran: list[str] = []
    done = threading.Event()
    dispatcher.gather(lambda: ran.append("gathered"))
    dispatcher.soon(lambda: ran.append("later"))
    dispatcher.soon(done.set)
    assert done.wait(PATIENCE_S)
    assert ran == ["gathered", "later"]
    dispatcher.gather(lambda: ran.append("before the end"))
    assert dispatcher.close()
    assert ran[2:] == ["before the end"]
    dispatcher.gather(lambda: ran.append("after it"))
    assert ran[3:] == ["after it"]


def test_what_observers_will_be_told_holds_no_result() -> None:
    """A call is told of after its end, but what has come of it goes as soon as nobody has it."""
    goes_on = threading.Event()
    records: list[colocate.CallRecord] = []

    class Observer:
        def colocate_group_spawned(self, group: colocate.ColocatedGroup) -> None:
            goes_on.wait(PATIENCE_S)

        def colocate_call_finished(self, record: colocate.CallRecord) -> None:
            records.append(record)

    with colocate.connect("local") as runtime:
        runtime.observe(Observer())
        maker = runtime.reserve(1).spawn({"maker": colocate.role(Maker)}).role("maker", Maker)
        (made,) = maker.make()
        gone = weakref.ref(made)
        del made
        assert gone() is None
        assert not records
        goes_on.set()
    assert [record.method for record in records] == ["make"]


def test_callback_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callback raises is reported, whatever it is, and later ones still run."""
    told: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: told.append(kind))
    ran = threading.Event()

    def fail(call: Any) -> None:
        raise SystemExit(1)

    with colocate.connect("local") as runtime:
        call = runtime.reserve(1).spawn({"echo": colocate.role(Echo)}).role("echo", Echo).one.submit()
        call.add_done_callback(fail)
        call.add_done_callback(lambda call: ran.set())
        assert ran.wait(PATIENCE_S)
    assert told == [SystemExit]


def test_callback_after_close() -> None:
    """A callback that is added when the runtime has been closed runs at once, so nobody waits for it for ever."""
    with colocate.connect("local") as runtime:
        echo = runtime.reserve(1).spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        with Gate() as gate:
            call = echo.wait.submit(gate.address)
            gate.wait_for(1)
            gate.open()
            assert call.result(PATIENCE_S) == [1]
    assert list(colocate.as_completed([call], timeout=PATIENCE_S)) == [call]


def test_close_in_callback() -> None:
    """A callback may close the runtime that is closing already, which has failed its call."""
    told: list[Any] = []
    with Gate() as gate:
        runtime = colocate.connect("local")
        group = runtime.reserve(1).spawn({"echo": colocate.role(Echo)})
        echo = group.role("echo", Echo)
        first, second = echo.wait.submit(gate.address), echo.wait.submit(gate.address)

        def close(call: Any) -> None:
            runtime.close()
            told.append(call.exception())

        gate.wait_for(1)
        second.add_done_callback(close)
        with pytest.raises(ExceptionGroup, match="had gone wrong"):  # the first call doesn't end in time
            runtime.close(grace=0)
        assert isinstance(first.exception(), ClosedError)
    assert isinstance(told[0], ClosedError)


def test_close_with_a_callback_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing doesn't wait for it for ever, and says where it is."""
    monkeypatch.setattr(jobs, "THREAD_ENDS_WITHIN_S", 0.1)
    begun, over = threading.Event(), threading.Event()

    def never_return(call: Any) -> None:
        begun.set()
        over.wait()

    runtime = colocate.connect("local")
    call = runtime.reserve(1).spawn({"echo": colocate.role(Echo)}).role("echo", Echo).one.submit()
    call.add_done_callback(never_return)
    try:
        assert begun.wait(PATIENCE_S)
        with pytest.raises(ExceptionGroup) as caught:
            runtime.close()
        (error,) = caught.value.exceptions
        assert "a callback or an observer of this runtime goes on" in str(error)
        assert "in never_return" in str(error)
        assert runtime.state == "closed"
    finally:
        over.set()


def test_the_thread_that_reads_all_connections_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups on its workers fail of that at once; the runtime closes as ever, and leaves nothing."""
    monkeypatch.setattr(threading, "excepthook", lambda told: None)

    def fail() -> None:
        raise SystemExit("on purpose")

    with colocate.connect("local", processes=True) as runtime:
        echo = runtime.reserve(1).spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        with Gate() as gate:
            call = echo.wait.submit(gate.address)
            gate.wait_for(1)
            executor: Any = runtime._node.services.executor
            executor.event_loop.later(0.0, fail)
            with pytest.raises(WorkerDied, match="thread 'colocate-local' was ended by SystemExit: on purpose"):
                call.result(PATIENCE_S)
