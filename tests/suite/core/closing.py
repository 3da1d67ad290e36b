"""Closing waits for running calls, reports errors, and always ends, whatever state a rank is in."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.errors import ClosedError, RoleError, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors import closing
from colocate.testing.executors._base import Spawn, needs
from colocate.testing.executors.closing import ROLES, hang_rank, last_rank
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty, HangsAtStart
from colocate.testing.probes.plain import Echo, Log
from colocate.testing.waiting import PATIENCE_S, Processes, send_signal, wait_until


class Closing(closing.Closing):
    """Closing groups, pools and runtimes."""

    def test_closed_group(self, spawn: Spawn) -> None:
        """Using a closed group raises ClosedError with the closing call and its line; closing twice is allowed."""
        group = spawn(ROLES, slots=1)
        echo = group.role("echo", Echo)
        resident = echo.first.keep("x")
        resident.fetch()
        group.close()
        group.close()
        for use in (
            echo.noop,
            echo.noop.submit,
            echo.noop.keep,
            resident.fetch,
            lambda: resident.spec,
            lambda: group.role("echo", Echo).noop(),
        ):
            with pytest.raises(ClosedError, match=r"was closed by group\.close\(\) at .*closing\.py:\d+") as caught:
                use()
            assert "closing.py:" in str(caught.value.closed_by)
        resident.free()
        assert group.state == "closed"

    def test_closed_runtime(self) -> None:
        """Closing a runtime closes its pools and groups."""
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
        """Leaving a with block closes its pool and group, and the error names the block's line."""
        with runtime.reserve(1, cpus=0) as pool, pool.spawn(ROLES) as group:
            echo = group.role("echo", Echo)
        with pytest.raises(ClosedError, match=r"leaving its with block at .*closing\.py:\d+"):
            echo.noop()
        assert not pool.alive

    def test_running_and_queued(self, spawn: Spawn) -> None:
        """A close cancels the running call, which may return within its grace, and fails queued and new calls."""
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
        """A close ends a rank that outlasts the grace; its error names the rank and frame, and the call fails."""
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

    def test_newest_first(self) -> None:
        """A runtime closes its newest pool first, and a pool its newest group."""
        closed: list[str] = []

        class Observer:
            def colocate_group_closed(self, name: str) -> None:
                closed.append(name)

        with self.connect() as runtime:
            runtime.observe(Observer())
            first, second = runtime.reserve(2, cpus=0), runtime.reserve(1, cpus=0)
            for part, name in ((first[0], "oldest"), (second, "middle"), (first[1], "newest-of-the-older-pool")):
                part.spawn({"echo": colocate.role(Echo)}, name=name)
        assert closed == ["middle", "newest-of-the-older-pool", "oldest"]


def worker_pids(group: ColocatedGroup) -> list[int]:
    """Return the pids of a group's workers."""
    return [pid for pid, _, _ in group.role("echo", Echo).place()]


def stop_rank(group: ColocatedGroup, gate: Gate) -> None:
    """Stop an idle rank."""
    send_signal(worker_pids(group)[-1], signal.SIGSTOP)


def stop_rank_in_call(group: ColocatedGroup, gate: Gate) -> None:
    """Stop a rank in the middle of a call."""
    hang_rank(group, gate)
    send_signal(group._node.workforce.workers[-1].pid or 0, signal.SIGSTOP)


def hold_the_gil(group: ColocatedGroup, gate: Gate) -> None:
    """Make a rank hold the interpreter's lock."""
    group.role("faulty", Faulty).hold_the_gil.options(ranks=[last_rank(group)]).submit(gate.address)
    gate.wait_for()
    gate.open()


def kill_rank(group: ColocatedGroup, gate: Gate) -> None:
    os.kill(worker_pids(group)[-1], signal.SIGKILL)


def find_close_problem(close: Callable[..., None]) -> list[Exception]:
    """Close with little grace, and return the errors."""
    try:
        close(grace=0.1)
    except ExceptionGroup as group:
        return list(group.exceptions)
    return []


class Converging(closing.Converging):
    """Closing always ends and frees everything, and raises errors only then."""

    @needs(OwnProcess)
    def test_faulty_ranks(self) -> None:
        """A pool's close ends stopped, hung, GIL-holding and dead ranks, and frees their slots at once."""
        faults: list[Callable[[ColocatedGroup, Gate], None]] = [
            stop_rank,
            stop_rank_in_call,
            hang_rank,
            hold_the_gil,
            kill_rank,
        ]
        with self.connect_privately(cpus=2) as runtime:
            for fault in faults:
                pool = runtime.reserve(2, timeout=0)
                group = pool.spawn(ROLES)
                processes = Processes(worker_pids(group))
                with Gate() as gate:
                    fault(group, gate)
                    wrong = find_close_problem(pool.close)
                    if fault is kill_rank:  # The death was noticed earlier, or counts as closed.
                        assert all(isinstance(error, WorkerDied) for error in wrong)
                    else:
                        assert "did not end within 0.1 s" in str(wrong[0])
                processes.wait_all()
                processes.release_all()
                assert (pool.state, group.state) == ("closed", "closed")

    @pytest.mark.parametrize("closing", ["group", "pool"])
    def test_close_ends_running_spawn(self, runtime: Runtime, closing: str) -> None:
        """A close by another thread ends a spawn whose constructor never returns; the spawn raises ClosedError."""
        pool = runtime.reserve(2, cpus=0)
        errors: list[BaseException] = []

        def spawn() -> None:
            try:
                pool.spawn({"slow": colocate.role(HangsAtStart, gate.address, (1,))}, name="unborn")
            except BaseException as error:
                errors.append(error)

        with Gate() as gate:
            spawner = threading.Thread(target=spawn)
            spawner.start()
            gate.wait_for()
            group = runtime.groups["unborn"]
            wrong = find_close_problem((group if closing == "group" else pool).close)
            spawner.join(PATIENCE_S)
            assert not spawner.is_alive()
        assert all("did not end within 0.1 s" in str(error) for error in wrong)
        assert [type(error) for error in errors] == [ClosedError]
        assert "unborn" not in runtime.groups
        pool.close()

    def test_grace_of_several(self, runtime: Runtime) -> None:
        """A pool's close cancels the running calls of all its groups at once, and fails queued calls."""
        pool = runtime.reserve(2, cpus=0)
        old, new = pool[0].spawn(ROLES), pool[1].spawn(ROLES)
        with Gate() as gate, Gate() as look:
            running = old.role("log", Log).look_until_cancelled.submit(look.address)
            look.wait_for()
            look.open()
            behind = old.role("log", Log).add.submit("behind")
            new.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for()
            closer = threading.Thread(target=pool.close)  # The newer group closes first, and hangs at its gate.
            closer.start()
            assert running.result(PATIENCE_S) == ["cancelled"]
            assert new.state != "closed"
        closer.join(PATIENCE_S)
        assert not closer.is_alive()
        assert isinstance(behind.exception(PATIENCE_S), ClosedError)

    def test_under_an_error(self, runtime: Runtime) -> None:
        """A close under an exception gives a hung rank 2 s, and its error becomes a note of the exception."""

        def fail() -> None:
            with runtime.reserve(1, cpus=0) as pool, pool.spawn(ROLES) as group:
                group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for()
                raise ZeroDivisionError

        with Gate() as gate, pytest.raises(ZeroDivisionError) as caught:
            fail()
        assert "did not end within 2 s" in caught.value.__notes__[0]
