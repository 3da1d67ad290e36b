"""Calls that can't be sent to all their ranks, the cost of sending, and interrupted closes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.counted import functions_called

import colocate
from colocate import ClosedError, ColocatedGroup, Concat, PerRank, Role, WorkerDied, method
from colocate._calls.pending import PendingCall
from colocate._protocol.ledger import TAGS
from colocate._protocol.message import decode_head
from colocate._protocol.to_worker import Call
from colocate.features.memory.calls import update_marks
from colocate.features.memory.marks import Sleepers
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


@pytest.mark.parametrize(
    ("count", "error"), [(1, KeyboardInterrupt()), (2, OSError(24, "Too many open files"))], ids=["ctrl-c", "files"]
)
def test_sent_in_part(count: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose sending fails leaves nothing pending and nothing borrowed, and the ranks stay in step."""
    send = ThreadHost.send
    made = 0

    def failing(host: ThreadHost, frame: Any) -> None:
        nonlocal made
        is_call = isinstance(decode_head(frame[0]), Call)
        made += is_call
        if is_call and made == count:
            raise error
        send(host, frame)

    with colocate.connect("local") as runtime, runtime.reserve(2) as pool:
        group = pool.spawn({"echo": colocate.role(Echo)})
        echo = group.role("echo", Echo)
        kept = echo.make.keep(1)
        kept.fetch()
        with Gate() as gate:
            waiting = echo.wait.submit(gate.address)
            monkeypatch.setattr(ThreadHost, "send", failing)
            with pytest.raises(type(error)):
                echo.each.keep([kept.ref, kept.ref])
            assert len(group._node.order.pending) == 1
            after = echo.each.submit([1, 2])
            gate.open()
            waiting.result(PATIENCE_S)
            assert after.result(PATIENCE_S) == [1, 2]
        kept.free()
        assert echo.make(1) == [0, 1]
        wait_until(lambda: not group._node.residents.records, "what was freed is forgotten")


class Large:
    """An argument whose encoding ends when the test allows it."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return int, (1,)


def test_while_an_argument_is_encoded() -> None:
    """While an argument is encoded, other groups can be called, and a worker's death is reported."""
    large = Large()
    with colocate.connect("local", processes=True) as runtime, ThreadPoolExecutor(1) as thread:
        one, other = (runtime.reserve(1).spawn({"echo": colocate.role(Echo)}) for _ in range(2))
        sent = thread.submit(one.role("echo", Echo).each, [large])
        try:
            assert large.begun.wait(PATIENCE_S)
            each = other.role("echo", Echo).each.options(timeout=PATIENCE_S / 2)
            assert each([2]) == [2]
            (pid,) = other.run(lambda ctx: os.getpid())
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                each([3])
        finally:
            large.may_end.set()
        assert sent.result(PATIENCE_S) == [1]


def test_interrupted_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while groups are closing still closes all of them, and leaves no call unresolved."""
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
    """An executor's failure to release or to close is raised at the end, and later closes succeed."""
    runtime = colocate.connect("local")
    pool = runtime.reserve(1)

    def fail(*args: Any) -> None:
        raise OSError("on purpose")

    for name in ("release", "close"):
        monkeypatch.setattr(runtime._node.services.executor, name, fail)
    with pytest.raises(ExceptionGroup) as caught:
        runtime.close()
    assert [type(error) for error in caught.value.exceptions] == [OSError, OSError]
    pool.close()
    runtime.close()
    assert [pool.state, runtime.state] == ["closed"] * 2


def test_closed_while_reserving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that arrive after the runtime was closed are released."""
    runtime = colocate.connect("local", cpus=1)
    executor = runtime._node.services.executor
    reserve, release = executor.reserve, executor.release
    released: list[Any] = []

    def late(request: Any) -> Any:
        reservation = reserve(request)
        runtime._node.close_here("the test", 10.0, False)
        return reservation

    def noted(reservation: Any) -> None:
        released.append(reservation)
        release(reservation)

    monkeypatch.setattr(executor, "reserve", late)
    monkeypatch.setattr(executor, "release", noted)
    with pytest.raises(ClosedError):
        runtime.reserve(1)
    assert len(released) == 1


def test_closed_while_spawning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that another thread closes while a group starts on it leaves no worker behind."""
    with colocate.connect("local") as runtime:
        pool, executor = runtime.reserve(2), runtime._node.services.executor
        launch = executor.launch
        launched: list[Any] = []

        def closing(*args: Any) -> Any:
            launched.append(args)
            if len(launched) == 2:
                pool._node.close_here("the test", 10.0, False)
            return launch(*args)

        monkeypatch.setattr(executor, "launch", closing)
        with pytest.raises(ClosedError):
            pool.spawn({"echo": colocate.role(Echo)})
        wait_until(lambda: not executor.running(), "all workers have gone")


def _given_modules(group: ColocatedGroup, count: int) -> None:
    """Mark so many of the driver's modules as sent to the group's workers."""
    group._node.published.shipped_modules.add_modules({name: (name, "as it is") for name in list(sys.modules)[:count]})


def _given_globals(group: ColocatedGroup, count: int) -> None:
    """Mark so many globals of the script as sent to the group's workers."""
    names = {f"name_{number}": number for number in range(count)}
    vars(sys.modules["__main__"]).update(names)
    group._node.published._sent.update(names)


def _dropped_handles(group: ColocatedGroup, count: int) -> None:
    """Keep so many calls that haven't ended, and drop their handles."""
    for _ in range(count):
        group.role("echo", Echo).make.keep(1)


@pytest.mark.parametrize("give", [_given_modules, _given_globals, _dropped_handles])
def test_call_cost_is_independent_of_earlier_sends(give: Callable[[ColocatedGroup, int], None]) -> None:
    """A call runs about as many functions after 300 modules, globals of the script or kept calls as after 5."""
    with colocate.connect("local") as runtime, Gate() as gate, ThreadPoolExecutor(1) as thread:
        group = runtime.reserve(1).spawn({"echo": colocate.role(Echo)})
        echo = group.role("echo", Echo)
        waiting = echo.wait.submit(gate.address)

        def work(count: int) -> int:
            give(group, count)
            return functions_called(lambda: echo.make.submit(1))

        # A call from the main thread would be sent by another one, which isn't counted.
        few, many = thread.submit(work, 5).result(), thread.submit(work, 300).result()
        gate.open()
        waiting.result(PATIENCE_S)
        assert echo.make(1) == [0]  # This call ends after all others.
        wait_until(lambda: not group._node.residents.records, "what was dropped is forgotten")
        assert many < few + 50


class Unreadable(PendingCall):
    """A call whose answers can't be read."""

    def _join_results(self, raw: Any) -> Any:
        raise colocate.ColocateError("a module of the driver's is another one")


def test_unreadable_wake_answer_is_ignored() -> None:
    """A wake whose answer can't be read raises nothing when it is handled, and its role keeps its marks."""
    sleepers = Sleepers()
    sleepers.add_marks("actor", TAGS, until_woken=False)
    call = Unreadable("wake of actor", "", "wake", [0])
    call._set_result([])
    update_marks(sleepers, sleepers.role_marks("actor", TAGS), call)
    assert sleepers.role_marks("actor", TAGS)
