"""Nothing of a user's runs on a thread that the framework needs: callbacks, observers and types disturb nobody."""

from __future__ import annotations

import asyncio
import io
import os
import queue
import sys
import threading
from typing import Any, NamedTuple

import pytest

import colocate
from colocate import CallTimeout, ColocatedGroup, ColocateError, Context, Role, method
from colocate.errors import RoleError, SerializationError, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty, HeldUp
from colocate.testing.probes.plain import Echo, Plain, Talker
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S


class Undisturbed(ExecutorCase):
    """Whatever users' code does on the driver or in a worker, what the framework promises is kept."""

    def test_a_callback_that_blocks(self, spawn: Spawn) -> None:
        """It stops callbacks, and nothing else: deadlines, awaits, residents and the end are as ever."""
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
            with rows.double.keep([1, 2, 3]) as kept:
                assert rows.double(kept.ref) == [4, 8, 12]
            with Gate() as gate:
                stuck = faulty.wait.submit(gate.address)
                gate.wait_for(2)
                with pytest.raises(ExceptionGroup, match="had gone wrong") as ended:
                    group.close(grace=0.6)
                assert "pass_gate" in str(ended.value.exceptions[0])
                assert isinstance(stuck.exception(PATIENCE_S), ColocateError)
        finally:
            over.set()

    def test_spec_of_a_type_that_goes_by_value(self, spawn: Spawn) -> None:
        """A NamedTuple of the script's own is a structure as any other; the next fetch comes too."""

        class Pair(NamedTuple):
            left: Any
            right: Any

        class Maker(Role):
            @method
            def make(self) -> Any:
                return Pair([1, 2], {"x": 3.0})

        maker = spawn({"maker": colocate.role(Maker)}, slots=1).role("maker", Maker)
        with maker.make.keep() as kept:
            structure = kept.spec.structure
            assert (structure.left, structure.right) == (["int", "int"], {"x": "float"})
            (fetched,) = kept.fetch(timeout=PATIENCE_S)
            assert (fetched.left, fetched.right) == ([1, 2], {"x": 3.0})

    def test_a_type_that_ends_threads(self, copying: ColocatedGroup) -> None:
        """One whose pickling raises SystemExit is an error of its fetch; the thread goes on."""
        faulty, echo = copying.role("faulty", Faulty), copying.role("echo", Echo)
        with faulty.leaver.keep() as kept, echo.echo.keep("x") as other:
            with pytest.raises((ColocateError, SerializationError), match="it leaves"):
                kept.fetch(timeout=PATIENCE_S)
            assert other.fetch(timeout=PATIENCE_S) == ["x", "x"]

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

    @needs(OwnProcess)
    def test_a_restart_that_a_type_ends(self, spawn: Spawn) -> None:
        """An argument of a role that can be packed once only: the group fails for good, and says why."""
        once: Any = Once()
        group = spawn({"plain": colocate.role(Plain, once)}, on_failure="restart", restarts=1)
        with pytest.raises(WorkerDied):
            group.run(_leave)
        with pytest.raises(ColocateError) as caught:
            group.wait_ready(PATIENCE_S)
        (note,) = [note for note in caught.value.__notes__ if "could not be restarted" in note]
        assert "once only" in note

    def test_progress_of_any_number(self, copying: ColocatedGroup) -> None:
        """A number of a type of the role's own is told as the number that it is: the driver needs no such type."""
        copying.run(_progress)
        copying.role("echo", Echo).noop()
        told = [worker.progress[None] for worker in copying._node.workforce.workers]
        assert told == [(1, 2), (1, 2)]
        assert {type(number) for pair in told for number in pair} == {int}

    def test_an_exception_that_ends_threads(self, copying: ColocatedGroup) -> None:
        """One whose unpickling raises SystemExit on the driver is told as text; the thread that reads goes on."""
        faulty, echo = copying.role("faulty", Faulty), copying.role("echo", Echo)
        with pytest.raises(RoleError, match="Leaving"):
            faulty.fail("leaving")
        assert echo.first("still there") == "still there"

    @needs(OwnProcess)
    def test_an_exception_that_holds_up(self, spawn: Spawn) -> None:
        """One that blocks where it is unpickled holds up who looks at it, and nobody else: not even its own group."""
        group = spawn({"faulty": colocate.role(Faulty), "echo": colocate.role(Echo)}, slots=1)
        faulty, echo = group.role("faulty", Faulty), group.role("echo", Echo)
        told: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        with Gate() as gate:
            failing = faulty.fail_held_up.submit(gate.address)
            looking = threading.Thread(target=lambda: told.put(failing.exception()))
            looking.start()
            gate.wait_for()
            assert echo.first.options(timeout=PATIENCE_S)("others go on") == "others go on"
            assert failing.done()
            assert told.empty()
        looking.join(PATIENCE_S)
        error = told.get(timeout=PATIENCE_S)
        assert isinstance(error, RoleError)
        assert isinstance(error.__cause__, HeldUp)

    def test_a_thread_of_the_driver_that_fails(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        """What no user's code can do, a mistake of the framework's can: its groups fail of it at once, none waits."""
        reported: list[Any] = []
        monkeypatch.setattr(threading, "excepthook", reported.append)
        with self.connect() as runtime:
            group = runtime.reserve(1).spawn({"faulty": colocate.role(Faulty)})
            with Gate() as gate:
                call = group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for(1)
                runtime._node.services.timers.soon(_make_a_mistake)
                error = call.exception(PATIENCE_S)
            assert isinstance(error, ColocateError)
            assert "met ZeroDivisionError: a mistake. That is a fault of colocate's own" in str(error)
            assert [each.exc_type for each in reported] == [ZeroDivisionError]

    def test_a_thread_of_a_worker_that_fails(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        """The worker says why, and leaves; its group fails of that at once."""
        monkeypatch.setattr(threading, "excepthook", lambda told: None)  # with threads the worker's is this one
        group = spawn({"faulty": colocate.role(Faulty)})
        with pytest.raises(WorkerDied) as caught:
            group.run(_break_the_transfer)
        said = "can't go on: the thread that sends its residents was ended by ZeroDivisionError: a mistake"
        assert said in str(caught.value)
        assert caught.value.rank == 0


def _make_a_mistake() -> None:
    raise ZeroDivisionError("a mistake")


class Once:
    """Can be packed once."""

    packed = False

    def __reduce__(self) -> tuple[Any, ...]:
        if self.packed:
            raise SystemExit("once only")
        self.packed = True
        return int, ()


def _leave(ctx: Context) -> None:
    os._exit(1)


def _progress(ctx: Context) -> None:
    class Count(int):
        def __reduce__(self) -> tuple[Any, ...]:
            return exit, ()

    ctx.progress(Count(1), Count(2))


def _break_the_transfer(ctx: Context) -> None:
    if ctx.rank == 0:
        host: Any = ctx._report.__self__  # type: ignore[union-attr]  # there is no public way to a mistake
        host._transfer.soon(_make_a_mistake)
    while not ctx.cancelled:
        threading.Event().wait(0.01)
