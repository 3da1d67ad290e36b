"""Lanes and the threads beside them survive users' code that misbehaves, and keep nothing alive while they wait."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import weakref
from typing import Any

import pytest

import colocate
from colocate import ClosedError, Role, RoleError, WorkerDied, method
from colocate._system import jobs
from colocate._system.room import OomKills
from colocate.testing.gate import Address, Gate, pass_gate
from colocate.testing.waiting import PATIENCE_S, wait_until


class Value:
    """A value whose end a test can see."""


class AsksAtItsEnd:
    """A value whose `__del__` makes the worker ask its driver for a module, after the report on a call."""

    def __del__(self) -> None:
        import tests.unit.counted  # noqa: F401


class Strange(Role):
    @method
    async def leave_in_task(self) -> None:
        async def leave() -> None:
            await asyncio.sleep(0)
            sys.exit(3)

        await asyncio.create_task(leave())

    @method
    def pid(self) -> int:
        return os.getpid()

    @method
    def take(self, value: Any) -> None:
        return

    @method
    def write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    @method
    def make(self) -> Value:
        return Value()

    @method
    def wait(self, gate: Address) -> None:
        pass_gate(gate)


def spawned(runtime: colocate.Runtime) -> Strange:
    """Return a view of a role on one slot."""
    return runtime.reserve(1).spawn({"strange": colocate.role(Strange)}).role("strange", Strange)


def test_on_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's SystemExit fails its call only, and an argument's `__del__` may import from the driver.

    The error for a worker that the kernel kills for lack of memory says so.
    """
    with colocate.connect("local", processes=True) as runtime:
        strange = spawned(runtime)
        with pytest.raises(RoleError, match="SystemExit"):
            strange.leave_in_task.submit().result(PATIENCE_S)
        for _ in range(2):
            strange.take.submit(AsksAtItsEnd()).result(PATIENCE_S)
        (pid,) = strange.pid()
        monkeypatch.setattr(
            OomKills, "describe_since", lambda before: "the kernel has killed a process for lack of memory"
        )
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            strange.pid()
        assert caught.value.signal == "SIGKILL"
        assert caught.value.detail == "the kernel has killed a process for lack of memory"


def test_a_line_without_end() -> None:
    """An endless line from a worker doesn't fill the driver's memory."""
    with colocate.connect("local", processes=True) as runtime:
        strange = spawned(runtime)
        (group,) = runtime.groups.values()
        worker: Any = group._node.workforce.workers[0]
        process = worker.host._process
        for _ in range(30):
            strange.write("#" * 1000)
        strange.write("last")
        wait_until(lambda: process._partial.endswith(b"last"), "all of it has come")
        assert len(process._partial) <= 8192


def test_arguments_and_results_are_let_go() -> None:
    """Neither a waiting lane nor the records that wait for observers keep an argument or a result alive."""
    goes_on = threading.Event()
    records: list[str] = []

    class Observer:
        def colocate_group_spawned(self, group: colocate.ColocatedGroup) -> None:
            goes_on.wait(PATIENCE_S)

        def colocate_call_finished(self, record: colocate.CallRecord) -> None:
            records.append(record.method)

    with colocate.connect("local") as runtime:
        runtime.observe(Observer())
        strange = spawned(runtime)
        (made,) = strange.make()
        gone = weakref.ref(made)
        del made
        assert gone() is None
        assert not records
        goes_on.set()
        value = Value()
        gone = weakref.ref(value)
        strange.take(value)
        del value
        wait_until(lambda: gc.collect() >= 0 and gone() is None, "the argument is freed")
    assert records == ["make", "take"]


def test_callback_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback's exception of any type is reported, and later callbacks still run."""
    told: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: told.append(kind))
    ran = threading.Event()

    def fail(call: Any) -> None:
        raise SystemExit(1)

    with colocate.connect("local") as runtime:
        call = spawned(runtime).pid.submit()
        call.add_done_callback(fail)
        call.add_done_callback(lambda call: ran.set())
        assert ran.wait(PATIENCE_S)
    assert told == [SystemExit]


def test_close_in_callback() -> None:
    """A callback may close the runtime whose close has failed the callback's call."""
    told: list[Any] = []
    with Gate() as gate:
        runtime = colocate.connect("local")
        strange = spawned(runtime)
        first, second = strange.wait.submit(gate.address), strange.wait.submit(gate.address)

        def close(call: Any) -> None:
            runtime.close()
            told.append(call.exception())

        gate.wait_for(1)
        second.add_done_callback(close)
        with pytest.raises(ExceptionGroup, match="closed with errors"):  # the first call doesn't end in time
            runtime.close(grace=0)
        assert isinstance(first.exception(), ClosedError)
    assert isinstance(told[0], ClosedError)


def test_close_with_a_callback_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close doesn't wait forever for a callback that never returns, and names its function."""
    monkeypatch.setattr(jobs, "THREAD_ENDS_WITHIN_S", 0.1)
    begun, over = threading.Event(), threading.Event()

    def never_return(call: Any) -> None:
        begun.set()
        over.wait()

    runtime = colocate.connect("local")
    call = spawned(runtime).pid.submit()
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
