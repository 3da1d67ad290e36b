"""The dispatcher: callbacks that misbehave or come late."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
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


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    made = Dispatcher("test")
    yield made
    made.close()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), ValueError("on purpose")])
def test_callback_raises(dispatcher: Dispatcher, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callback raises is reported, whatever it is, and later ones still run."""
    told: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: told.append(kind))
    ran = threading.Event()

    def fail() -> None:
        raise error

    dispatcher.soon(fail)
    dispatcher.soon(ran.set)
    assert ran.wait(PATIENCE_S)
    assert told == [type(error)]


def test_gathered_jobs_come_by_themselves(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, in their order; one that raises is reported and keeps none of the others."""
    told: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: told.append(kind))
    ran: list[int] = []
    done = threading.Event()

    def fail() -> None:
        raise ValueError("on purpose")

    dispatcher.gather(lambda: ran.append(1))
    dispatcher.gather(fail)
    dispatcher.gather(lambda: ran.append(2))
    dispatcher.gather(done.set)
    assert done.wait(PATIENCE_S)
    assert ran == [1, 2]
    assert told == [ValueError]


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


def test_jobs_of_both_kinds_keep_their_order(dispatcher: Dispatcher) -> None:
    """Also behind a job that takes long: observers hear of a group before they hear of its calls."""
    ran: list[str] = []
    begun, goes_on, done = threading.Event(), threading.Event(), threading.Event()

    def take_long() -> None:
        begun.set()
        goes_on.wait()

    dispatcher.soon(take_long)
    assert begun.wait(PATIENCE_S)
    dispatcher.soon(lambda: ran.append("spawned"))
    dispatcher.gather(lambda: ran.append("called"))
    dispatcher.soon(lambda: ran.append("closed"))
    dispatcher.soon(done.set)
    goes_on.set()
    assert done.wait(PATIENCE_S)
    assert ran == ["spawned", "called", "closed"]


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
            executor.hub.later(0.0, fail)
            with pytest.raises(WorkerDied, match="thread 'colocate-local' was ended by SystemExit: on purpose"):
                call.result(PATIENCE_S)
