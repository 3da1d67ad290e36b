"""Threads: users' code doesn't disturb the framework's threads, and role code may set alarms."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from typing import Any

import pytest
from tests.suite.probes.limited import Late, LimitedRole, is_late
from tests.suite.probes.plain import Talker

import colocate
from colocate import CallTimeout, ColocateError, Context, Runtime
from colocate.errors import RoleError, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.executors.drivers import Scripted
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S


class Undisturbed(ExecutorCase):
    """Users' code that blocks, and framework threads that fail."""

    def test_a_callback_that_blocks(self, spawn: Spawn) -> None:
        """A blocking callback leaves timeouts, waits, awaits, residents and the close working."""
        group = spawn({"echo": colocate.role(Echo), "rows": colocate.role(Rows), "faulty": colocate.role(Faulty)})
        echo, rows, faulty = group.role("echo", Echo), group.role("rows", Rows), group.role("faulty", Faulty)
        begun, over = threading.Event(), threading.Event()

        def block(call: Any) -> None:
            begun.set()
            over.wait(PATIENCE_S)

        echo.first.submit(1).add_done_callback(block)
        try:
            assert begun.wait(PATIENCE_S)
            with Gate() as gate, pytest.raises(CallTimeout) as caught:
                faulty.wait.options(timeout=0.2)(gate.address)
            assert caught.value.stacks
            calls = [echo.first.submit(index) for index in range(3)]
            assert set(colocate.as_completed(calls, timeout=PATIENCE_S)) == set(calls)

            async def awaited() -> Any:
                return await asyncio.wait_for(echo.first.submit("awaited"), PATIENCE_S)

            assert asyncio.run(awaited()) == "awaited"
            with rows.double.keep([1, 2, 3]) as resident:
                assert rows.double(resident.ref) == [4, 8, 12]
            with Gate() as gate:
                stuck = faulty.wait.submit(gate.address)
                gate.wait_for(2)
                with pytest.raises(ExceptionGroup, match="closed with errors") as ended:
                    group.close(grace=0.6)
                assert "pass_gate" in str(ended.value.exceptions[0])
                assert isinstance(stuck.exception(PATIENCE_S), ColocateError)
        finally:
            over.set()

    @needs(OwnProcess)
    @pytest.mark.parametrize("raises", [False, True])
    def test_broken_stderr_stops_no_calls(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
        """With a `sys.stderr` that blocks or raises, calls run, and a dead worker's error has its last output."""
        group = spawn({"talker": colocate.role(Talker), "faulty": colocate.role(Faulty)})
        talker, faulty = group.role("talker", Talker), group.role("faulty", Faulty)
        over = threading.Event()

        class Stuck(io.StringIO):
            def write(self, text: str) -> int:
                if raises:
                    raise SystemExit("nobody takes it")
                over.wait(PATIENCE_S)
                return len(text)

        monkeypatch.setattr(sys, "stderr", Stuck())
        try:
            assert talker.talk(200, 1000) == [200, 200]
            with pytest.raises(WorkerDied) as caught:
                faulty.exit(3, "the last words")
            assert "the last words" in str(caught.value.log_tail)
        finally:
            over.set()
        group.close()

    def test_a_thread_of_the_driver_that_fails(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        """A driver thread that fails by a bug of the framework fails the running calls with that error."""
        reported: list[Any] = []
        monkeypatch.setattr(threading, "excepthook", reported.append)
        with self.connect() as runtime:
            group = runtime.reserve(1).spawn({"faulty": colocate.role(Faulty)})
            with Gate() as gate:
                call = group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for(1)
                runtime._node.services.timers.call_soon(_raise_mistake)
                error = call.exception(PATIENCE_S)
            assert isinstance(error, ColocateError)
            assert "met ZeroDivisionError: a mistake. That is a fault of colocate's own" in str(error)
            assert [failure.exc_type for failure in reported] == [ZeroDivisionError]

    @needs_feature("functions")
    def test_a_thread_of_a_worker_that_fails(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker whose transfer thread fails exits, and its group fails with the reason."""
        monkeypatch.setattr(threading, "excepthook", lambda told: None)  # A worker on a thread has this hook, too.
        group = spawn({"faulty": colocate.role(Faulty)})
        with pytest.raises(WorkerDied) as caught:
            group.run(_break_transfer)
        message = "can't go on: the thread that sends its residents was ended by ZeroDivisionError: a mistake"
        assert message in str(caught.value)
        assert caught.value.rank == 0


def _raise_mistake() -> None:
    raise ZeroDivisionError("a mistake")


def _break_transfer(ctx: Context) -> None:
    if ctx.rank == 0:
        host: Any = ctx._report.__self__  # type: ignore[union-attr]  # No public call makes this thread fail.
        host._transfer.call_soon(_raise_mistake)
    while not ctx.cancelled:
        threading.Event().wait(0.01)


class Handlers(Scripted):
    """Signal handlers of role code."""

    @needs_feature("functions")
    def test_a_limit_of_time(self, spawn: Spawn, runtime: Runtime) -> None:
        """A method may limit its time by an alarm; on a worker's thread the error names `processes=True`."""
        group = spawn({"limited": colocate.role(LimitedRole)}, slots=1)
        limited = group.role("limited", LimitedRole)
        if isinstance(runtime._node.services.executor, OwnProcess):
            assert limited.score()
            assert limited.score_step()
            assert group.run(lambda ctx: is_late()) == [True]
            return
        with pytest.raises(RoleError, match=r"signal only works in main thread(.|\n)*processes=True"):
            limited.score()

    @needs(OwnProcess)
    def test_an_error_of_the_call(self, spawn: Spawn) -> None:
        """A signal handler's exception becomes the error of the running call, wherever the signal arrives."""
        limited = spawn({"limited": colocate.role(LimitedRole)}, slots=1).role("limited", LimitedRole)
        for call in (limited.overruns, limited.awaits, limited.returns_slowly):
            with pytest.raises(RoleError, match="too late") as caught:
                call()
            assert isinstance(caught.value.__cause__, Late)
        assert limited.seen() == [False]  # The awaited sleep was cancelled.
