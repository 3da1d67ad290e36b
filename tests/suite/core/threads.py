"""Users' code and the threads: what role code expects of its own, and that nobody's code disturbs the framework's."""

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
    """Whatever users' code does on the driver or in a worker, what the framework promises is kept."""

    def test_a_callback_that_blocks(self, spawn: Spawn) -> None:
        """A callback stops callbacks, and nothing else: deadlines, awaits, residents and the end are as ever."""
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
                with pytest.raises(ExceptionGroup, match="had gone wrong") as ended:
                    group.close(grace=0.6)
                assert "pass_gate" in str(ended.value.exceptions[0])
                assert isinstance(stuck.exception(PATIENCE_S), ColocateError)
        finally:
            over.set()

    @needs(OwnProcess)
    @pytest.mark.parametrize("raises", [False, True])
    def test_output_that_nobody_takes(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
        """With a `sys.stderr` that blocks, or raises, calls go on, and a worker's end has its last words."""
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
        """What no user's code can do, a mistake of the framework's can: its groups fail of it at once, none waits."""
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
        """The worker says why, and leaves; its group fails of that at once."""
        monkeypatch.setattr(threading, "excepthook", lambda told: None)  # with threads the worker's is this one
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
        host: Any = ctx._report.__self__  # type: ignore[union-attr]  # there is no public way to a mistake
        host._transfer.call_soon(_raise_mistake)
    while not ctx.cancelled:
        threading.Event().wait(0.01)


class Handlers(Scripted):
    """What role code expects of the thread that it runs on."""

    @needs_feature("functions")
    def test_a_limit_of_time(self, spawn: Spawn, runtime: Runtime) -> None:
        """A method may limit its time by an alarm. Where its thread isn't the main one the error says what to do."""
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
        """What a handler raises is the error of the call, wherever the signal comes, and of no other."""
        limited = spawn({"limited": colocate.role(LimitedRole)}, slots=1).role("limited", LimitedRole)
        for call in (limited.overruns, limited.awaits, limited.returns_slowly):
            with pytest.raises(RoleError, match="too late") as caught:
                call()
            assert isinstance(caught.value.__cause__, Late)
        assert limited.seen() == [False]  # what was awaited has been cancelled
