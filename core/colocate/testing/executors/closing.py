"""Closing: what it waits for, what it ends, what it says, and that it always ends."""

from __future__ import annotations

import queue
import signal
import threading
from typing import Any

import pytest

import colocate
from colocate import RoleSpec, Runtime
from colocate._calls.stacks import Stacks
from colocate.errors import ClosedError, RoleError
from colocate.executor import OwnProcess
from colocate.keeper.outside import py_spy
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, of_executor, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo, Log
from colocate.testing.waiting import PATIENCE_S, Processes, send, wait_until

ROLES: dict[str, RoleSpec[Any]] = {
    "echo": colocate.role(Echo),
    "log": colocate.role(Log),
    "faulty": colocate.role(Faulty),
}


class Closing(ExecutorCase):
    """Closing groups, pools and runtimes."""

    def test_closed_group(self, spawn: Spawn) -> None:
        """Using a closed group raises ClosedError that says what closed it and where; closing is idempotent."""
        group = spawn(ROLES, slots=1)
        echo = group.role("echo", Echo)
        kept = echo.first.keep("x")
        kept.fetch()
        group.close()
        group.close()
        for use in (
            echo.noop,
            echo.noop.submit,
            echo.noop.keep,
            kept.fetch,
            lambda: kept.spec,
            lambda: group.role("echo", Echo).noop(),
        ):
            with pytest.raises(ClosedError, match=r"was closed by group\.close\(\) at .*closing\.py:\d+") as caught:
                use()
            assert "closing.py:" in str(caught.value.closed_by)
        kept.free()
        assert group.state == "closed"

    def test_closed_runtime(self) -> None:
        """A closed runtime has closed everything below it."""
        runtime = self.connect()
        pool = runtime.reserve(1, cpus=0)
        group = pool.spawn(ROLES)
        call = group.role("echo", Echo).first.submit("in time")
        assert call.result(PATIENCE_S) == "in time"
        runtime.close()
        runtime.close()
        for use in (
            lambda: runtime.reserve(1),
            lambda: pool.spawn(ROLES),
            group.role("echo", Echo).noop,
            runtime.audit,
        ):
            with pytest.raises(ClosedError, match=r"runtime"):
                use()
        assert call.result() == "in time"
        assert (runtime.state, pool.state, group.state) == ("closed",) * 3

    def test_with_block(self, runtime: Runtime) -> None:
        """Leaving a with block closes; the error says so."""
        with runtime.reserve(1, cpus=0) as pool, pool.spawn(ROLES) as group:
            echo = group.role("echo", Echo)
        with pytest.raises(ClosedError, match=r"leaving its with block at .*closing\.py:\d+"):
            echo.noop()
        assert not pool.alive

    def test_error_and_failure(self, runtime: Runtime) -> None:
        """An error in the block isn't hidden by what goes wrong at closing."""

        def fail() -> None:
            with runtime.reserve(1, cpus=0, name="doomed") as pool, pool.spawn(ROLES) as group:
                group.role("faulty", Faulty).fail.keep()
                group.role("faulty", Faulty).fine()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert "doomed" not in [pool.name for pool in runtime._node.children.values()]

    def test_running_and_queued(self, spawn: Spawn) -> None:
        """A running call sees ctx.cancelled and has its grace; queued ones fail with ClosedError; none stays open."""
        group = spawn(ROLES, slots=1)
        log = group.role("log", Log)
        with Gate() as gate:
            running = log.look_until_cancelled.submit(gate.address)
            queued = [log.add.submit(index) for index in range(3)]
            gate.wait_for()
            closer = threading.Thread(target=group.close)
            closer.start()
            wait_until(lambda: not group.alive, "the close has begun")
            with pytest.raises(ClosedError):
                log.add.submit("too late")
        closer.join()
        assert running.result(PATIENCE_S) == ["cancelled"]
        for call in queued:
            assert isinstance(call.exception(PATIENCE_S), ClosedError)

    def test_hung_rank(self, spawn: Spawn) -> None:
        """What isn't done within the grace is ended; close says which rank, and where it was; its call fails."""
        group = spawn(ROLES, name="hung")
        with Gate() as gate:
            call = group.role("log", Log).at.submit([None, gate.address], ["add", "add"])  # type: ignore[arg-type]
            gate.wait_for()
            with pytest.raises(ExceptionGroup) as caught:
                group.close(grace=0.05)
            (error,) = caught.value.exceptions
            assert isinstance(error, RoleError)
            assert (error.group, error.rank) == ("hung", 1)
            assert "did not end within 0.05 s" in str(error)
            assert "in pass_gate" in str(error)
            assert isinstance(call.exception(PATIENCE_S), ClosedError)
            assert [slot.state for slot in group.owner.slots] == ["free", "free"]

    @needs(OwnProcess)
    @smoke
    def test_hung_process(self, runtime: Runtime) -> None:
        """A worker process that hangs is gone when close returns, and so is one that holds the interpreter's lock."""
        with runtime.reserve(1, cpus=0) as pool:
            for hang in (Faulty.wait, Faulty.hold_the_gil):
                group = pool.spawn(ROLES)
                processes = Processes(pid for pid, _, _ in group.role("echo", Echo).place())
                with Gate() as gate:
                    getattr(group.role("faulty", Faulty), hang.__name__).submit(gate.address)
                    gate.wait_for()
                    if hang is Faulty.hold_the_gil:
                        gate.open()
                    with pytest.raises(ExceptionGroup, match="gone wrong"):
                        group.close(grace=0.05)
                    processes.wait()
                    processes.close()

    @needs(OwnProcess)
    def test_where_a_silent_rank_is(self, runtime: Runtime) -> None:
        """One that C code keeps from answering, and one that is stopped, are looked at from outside."""
        if py_spy() is None:
            pytest.skip("py-spy is neither beside this interpreter nor on the path: pip install py-spy")
        with runtime.reserve(2, cpus=0) as pool, Gate() as gate:
            group = pool.spawn(ROLES)
            faulty = group.role("faulty", Faulty)
            pids = [pid for pid, _, _ in group.role("echo", Echo).place()]
            faulty.wait.options(ranks=[0]).submit(gate.address)
            faulty.hold_the_gil.options(ranks=[1]).submit(gate.address)
            gate.wait_for(2)
            send(pids[0], signal.SIGSTOP)
            gate.open()
            answers: queue.SimpleQueue[Stacks] = queue.SimpleQueue()
            seen: dict[int, str] = {}

            def both_seen() -> bool:  # again, where a rank hadn't come so far, or a busy machine took too long
                group._node.order.stacks.ask([0, 1], answers.put)
                seen.update(answers.get(timeout=PATIENCE_S).seen)
                return 0 in seen and seen.get(1, "").startswith("in C code that holds the GIL\n")

            wait_until(both_seen, "both have been seen from outside")
            with pytest.raises(ExceptionGroup, match="gone wrong"):
                group.close(grace=0.05)
        assert seen[0].startswith("stopped by a signal\n")
        assert "in pass_gate" in seen[0]
        assert "in Faulty.hold_the_gil" in seen[1]

    def test_newest_first(self) -> None:
        """An owner closes what it owns in reverse: the newest first, so that nobody loses what it stands on."""
        closed: list[str] = []

        class Observer:
            def colocate_group_closed(self, name: str) -> None:
                closed.append(name)

        with self.connect() as runtime:
            runtime.observe(Observer())
            first, second = runtime.reserve(2, cpus=0), runtime.reserve(1, cpus=0)
            for part, name in ((first[0], "oldest"), (second, "middle"), (first[1], "newest of the older pool")):
                part.spawn({"echo": colocate.role(Echo)}, name=name)
        assert closed == ["middle", "newest of the older pool", "oldest"]

    @of_executor
    def test_every_error(self, runtime: Runtime) -> None:
        """The owner's close frees everything, and only then raises what went wrong, together."""
        pool = runtime.reserve(2, cpus=0)
        for part in (pool[0], pool[1]):
            group = part.spawn(ROLES)
            group.role("faulty", Faulty).fail.keep()
            group.role("faulty", Faulty).fine()
        with pytest.raises(ExceptionGroup) as caught:
            pool.close()
        assert [type(error) for error in caught.value.exceptions] == [RoleError, RoleError]
        assert pool.state == "closed"

    def test_from_another_thread(self, spawn: Spawn) -> None:
        """Any thread may close, several at once too: each returns when it is closed."""
        group = spawn(ROLES, slots=1)
        states: list[str] = []

        def close() -> None:
            group.close()
            states.append(group.state)

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert states == ["closed"] * 3

    def test_from_a_callback(self, spawn: Spawn) -> None:
        """A done callback may close the group."""
        group = spawn(ROLES, slots=1)
        heard: list[str] = []

        def close(call: Any) -> None:
            group.close()
            heard.append(group.state)

        group.role("echo", Echo).noop.submit().add_done_callback(close)
        wait_until(lambda: heard == ["closed"], "the callback has closed the group")
