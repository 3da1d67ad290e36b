"""Calls that can't be sent to all their ranks, and closing that is interrupted."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.counted import functions_called

import colocate
from colocate import ClosedError, ColocatedGroup, Concat, PerRank, Role, SerializationError, WorkerDied, method
from colocate._calls.pending import PendingCall
from colocate._protocol.from_worker import Done
from colocate._protocol.ledger import TAGS
from colocate._protocol.message import read
from colocate._protocol.to_worker import Call
from colocate._views.sending import note
from colocate._worker_group.published import Published
from colocate._worker_group.sleepers import Sleepers
from colocate._worker_group.workforce import Workforce
from colocate.testing.gate import Address, Gate, pass_gate
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_local.threads import ThreadHost


class Echo(Role):
    @method
    def wait(self, gate: Address) -> None:
        pass_gate(gate)

    @method(collect=Concat())
    def make(self, rows: int) -> list[int]:
        return [self.ctx.rank] * rows

    @method(dispatch=PerRank("item"))
    def each(self, item: Any) -> Any:
        return item


def _failing_at(group: ColocatedGroup, count: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on sending a call to the count-th rank fails, once."""
    group._node.order.gate.shut("a test")  # else calls are posted, which can't fail so
    send = ThreadHost.send
    made = 0

    def failing(host: ThreadHost, frame: Any) -> None:
        nonlocal made
        is_call = isinstance(read(frame[0]), Call)
        made += is_call
        if is_call and made == count:
            raise error
        send(host, frame)

    monkeypatch.setattr(ThreadHost, "send", failing)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyboardInterrupt()], ids=["files", "ctrl-c"])
def test_sent_in_part(count: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose sending fails leaves nothing pending and nothing borrowed, and the ranks stay in step."""
    with colocate.connect("local") as runtime, runtime.reserve(2) as pool:
        group = pool.spawn({"echo": colocate.role(Echo)})
        echo = group.role("echo", Echo)
        kept = echo.make.keep(1)
        kept.fetch()
        with Gate() as gate:
            waiting = echo.wait.submit(gate.address)
            _failing_at(group, count, error, monkeypatch)
            with pytest.raises(type(error)):
                echo.each.keep([kept.ref, kept.ref])
            assert len(group._node.order.pending) == 1
            after = echo.each.submit([1, 2])
            gate.open()
            waiting.result(PATIENCE_S)
            assert after.result(PATIENCE_S) == [1, 2]
        kept.free()
        assert echo.make(1) == [0, 1]
        wait_until(lambda: not group._node.residents.kept, "what was freed is forgotten")


@pytest.mark.parametrize("kind", ["Call", "Batch", "Free"])
def test_releases_of_a_failed_send(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a message that could not be sent to all ranks was to tell them to forget, a later one tells."""
    with colocate.connect("local") as runtime, runtime.reserve(2) as pool:
        group = pool.spawn({"echo": colocate.role(Echo)})
        echo = group.role("echo", Echo)
        stores = [cast("ThreadHost", worker.host).worker.store for worker in group._node.workforce.workers]
        kept = echo.make.keep(1)
        kept.fetch()
        failures: list[str] = []
        calls: list[colocate.Call[Any]] = []
        send = ThreadHost.send
        group._node.order.gate.shut("a test")  # else calls are posted, which can't fail so

        def failing(host: ThreadHost, frame: Any) -> None:
            if type(read(frame[0])).__name__ == kind and host is group._node.workforce.workers[1].host and not failures:
                failures.append(kind)
                raise OSError(24, "Too many open files")
            send(host, frame)

        monkeypatch.setattr(ThreadHost, "send", failing)

        def use() -> None:  # not on the main thread, which has its calls sent by another one
            with group._node.order.lock:  # so that no other message carries it
                kept.free()
                if kind == "Call":
                    calls.append(echo.make.submit(1))  # which is sent when the lock is free
                elif kind == "Batch":
                    with pytest.raises(OSError, match="open files"), group.pipeline():
                        _ = echo.make.submit(1), echo.make.submit(1)

        with ThreadPoolExecutor(1) as other:
            other.submit(use).result(PATIENCE_S)
        assert all(isinstance(call.exception(PATIENCE_S), OSError) for call in calls)
        wait_until(lambda: failures == [kind], "sending has failed")
        wait_until(lambda: [len(store.entries) for store in stores] == [0, 0], "both ranks have been told")
        assert echo.make(1) == [0, 1]


def test_interrupted_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while groups are closing: all of them are closed nevertheless, and no call stays unresolved."""
    with Gate() as gate:
        runtime = colocate.connect("local")
        pool = runtime.reserve(2)
        first = pool[0].spawn({"echo": colocate.role(Echo)})
        second = pool[1].spawn({"echo": colocate.role(Echo)})
        calls = [group.role("echo", Echo).wait.submit(gate.address) for group in (first, second)]
        gate.wait_for(2)

        def interrupted(*args: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(second._node.workforce, "_wait_for_lanes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.close(grace=0.1)
        assert [type(call.exception(PATIENCE_S)) for call in calls] == [ClosedError] * 2
        assert [first.state, second.state, pool.state, runtime.state] == ["closed"] * 4


def test_release_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that fails to release or to close is told of at the end, and keeps nobody waiting."""
    runtime = colocate.connect("local")
    pool = runtime.reserve(1)

    def fail(*args: Any) -> None:
        raise OSError("on purpose")

    monkeypatch.setattr(runtime._node.services.executor, "release", fail)
    monkeypatch.setattr(runtime._node.services.executor, "close", fail)
    with pytest.raises(ExceptionGroup) as caught:
        runtime.close()
    assert [type(error) for error in caught.value.exceptions] == [OSError, OSError]
    pool.close()
    runtime.close()
    assert [pool.state, runtime.state] == ["closed"] * 2


def test_closed_while_reserving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that come when the runtime has been closed are given back."""
    runtime = colocate.connect("local", cpus=1)
    reserve, release = runtime._node.services.executor.reserve, runtime._node.services.executor.release
    released: list[Any] = []

    def late(request: Any) -> Any:
        reservation = reserve(request)
        runtime._node.close_here("the test", 10.0, False)
        return reservation

    def noted(reservation: Any) -> None:
        released.append(reservation)
        release(reservation)

    monkeypatch.setattr(runtime._node.services.executor, "reserve", late)
    monkeypatch.setattr(runtime._node.services.executor, "release", noted)
    with pytest.raises(ClosedError):
        runtime.reserve(1)
    assert len(released) == 1


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_closed_while_spawning(processes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that another thread closes while a group starts on it leaves no worker behind."""
    with colocate.connect("local", processes=processes) as runtime:
        pool = runtime.reserve(2)
        launch = runtime._node.services.executor.launch
        launched = 0

        def closing(*args: Any) -> Any:
            nonlocal launched
            launched += 1
            if launched == 2:
                pool._node.close_here("the test", 10.0, False)
            return launch(*args)

        monkeypatch.setattr(runtime._node.services.executor, "launch", closing)
        with pytest.raises(ClosedError):
            pool.spawn({"echo": colocate.role(Echo)})
        wait_until(lambda: not runtime._node.services.executor.running(), "all workers have gone")


def test_roles_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is all there is to be said, however long the workers take to end, in which nothing runs."""

    def refuse(published: Published, *_: Any) -> None:
        for worker in published._workers():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
        raise SerializationError("a global of the script can't be sent")

    with colocate.connect("local", processes=True) as runtime, runtime.reserve(1) as pool:
        monkeypatch.setattr(Published, "before", refuse)
        with pytest.raises(SerializationError) as caught:
            pool.spawn({"echo": colocate.role(Echo)})
        assert getattr(caught.value, "__notes__", []) == []
        assert pool.groups == {}


def test_died_before_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies when its roles are there but nobody has been told yet fails its group."""
    with colocate.connect("local", processes=True) as runtime:
        pool = runtime.reserve(1)
        ready = Workforce.ready

        def late(workforce: Workforce) -> None:
            workforce.workers[0].host.kill()
            wait_until(lambda: workforce.workers[0].exit, "the worker has died")
            ready(workforce)

        monkeypatch.setattr(Workforce, "ready", late)
        group = pool.spawn({"echo": colocate.role(Echo)})
        with pytest.raises(WorkerDied):
            group.role("echo", Echo).make(1)


def test_encoding_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a large message of one group is encoded, whatever workers say is heard, and other groups' calls go on."""
    with colocate.connect("local", processes=True) as runtime:
        pool = runtime.reserve(2)
        large, other = (slot.spawn({"echo": colocate.role(Echo)}) for slot in (pool[0], pool[1]))
        order, executor = large._node.order, runtime._node.services.executor
        order.gate.shut("a test")  # what is small is posted, without that lock
        done, numbered = order.done, executor.numbered
        begun, heard, goes_on = Event(), Event(), Event()
        waits: list[bool] = []

        def hear(slot: int, message: Done, body: Any) -> None:  # on the event loop's thread
            if not heard.is_set():
                free = order.lock.lock.acquire(blocking=False)
                waits.append(not free)
                if free:
                    order.lock.lock.release()
                heard.set()
            done(slot, message, body)

        def slow(message: Any, body: Any) -> Any:
            monkeypatch.setattr(executor, "numbered", numbered)  # others aren't
            begun.set()
            goes_on.wait(PATIENCE_S)
            return numbered(message, body)

        with Gate() as gate, ThreadPoolExecutor(1) as thread:
            waiting = large.role("echo", Echo).wait.submit(gate.address)
            gate.wait_for()
            monkeypatch.setattr(order, "done", hear)
            monkeypatch.setattr(executor, "numbered", slow)
            sent = thread.submit(large.role("echo", Echo).each.submit, ["large"])
            try:
                assert begun.wait(PATIENCE_S)
                gate.open()
                assert heard.wait(PATIENCE_S)
                assert waits == [False], "the only thread that hears workers waits for the encoding"
                assert other.role("echo", Echo).make.submit(1).result(PATIENCE_S) == [0]
                waiting.result(PATIENCE_S)
            finally:
                goes_on.set()
            assert sent.result(PATIENCE_S).result(PATIENCE_S) == ["large"]


def _given_modules(group: ColocatedGroup, count: int) -> None:
    """Its workers have got so many of the driver's modules, and it has imported none since a call has looked."""
    group._node.published.given.add({name: (name, "as it is") for name in list(sys.modules)[:count]})


def _given_globals(group: ColocatedGroup, count: int) -> None:
    """They have got so many globals of the script."""
    names = {f"name_{number}": number for number in range(count)}
    vars(sys.modules["__main__"]).update(names)
    group._node.published._sent.update(names)


@pytest.mark.parametrize("give", [_given_modules, _given_globals])
def test_what_was_sent_costs_calls_nothing(give: Callable[[ColocatedGroup, int], None]) -> None:
    """A call does as much whether workers have got 5 modules or globals of the script, or 300 of them."""
    with colocate.connect("local") as runtime, ThreadPoolExecutor(1) as thread:
        group = runtime.reserve(1).spawn({"echo": colocate.role(Echo)})
        make = group.role("echo", Echo).make

        def work(count: int) -> int:
            give(group, count)
            return functions_called(lambda: make.submit(1))

        few, many = thread.submit(work, 5).result(), thread.submit(work, 300).result()
        assert many < few + 50


class Unreadable(PendingCall):
    """One of which the answers can't be read."""

    def _joined(self, raw: Any) -> Any:
        raise colocate.ColocateError("a module of the driver's is another one")


def test_a_wake_whose_answer_can_not_be_read() -> None:
    """The thread that hears of it raises nothing: the calls that it goes before say it, and go behind the next one."""
    group: Any = SimpleNamespace(sleepers=Sleepers(["actor"]))
    call = Unreadable("wake of actor", "", "wake", [0])
    call._settle([])
    note(group, group.sleepers.seen("actor", TAGS), call)
    assert group.sleepers.seen("actor", TAGS)
