"""Tests of workers that die during or between calls, and of slots whose machine fails."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from functools import partial
from typing import Any

import psutil
import pytest

import colocate
from colocate import RoleSpec, Runtime
from colocate.errors import ColocateError, GroupRestarted, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty, Parent
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, Processes, wait_until


class Deaths(ExecutorCase):
    """If a worker dies, the whole group fails with an error that says what happened."""

    @needs(OwnProcess)
    @smoke
    def test_killed_in_a_call(self, spawn: Spawn) -> None:
        """`WorkerDied` has the rank, pid, node, signal and running call, and all pending calls fail with this error."""
        group = spawn({"faulty": colocate.role(Faulty), "echo": colocate.role(Echo)})
        pids = [pid for pid, _, _ in group.role("echo", Echo).place()]
        faulty = group.role("faulty", Faulty)
        processes = Processes(pids)
        with Gate() as gate:
            faulty.wait.submit(gate.address)
            calls = [faulty.kill.submit(ranks=(1,)), faulty.fine.submit(), group.role("echo", Echo).noop.submit()]
        error = calls[0].exception(PATIENCE_S)
        processes.wait_all()
        processes.release_all()
        assert isinstance(error, WorkerDied)
        assert isinstance(error, RuntimeError)
        assert (error.group, error.rank, error.pid, error.node) == (group.name, 1, pids[1], group.owner.slots[1].node)
        assert (error.signal, error.exitcode) == ("SIGKILL", None)
        assert error.running == "faulty.kill"
        assert f"(pid {pids[1]}" in str(error)
        assert "SIGKILL" in str(error)
        assert [call.exception(PATIENCE_S) for call in calls] == [error] * 3
        # Each call has its own copy of the error, so that threads don't share a traceback.
        assert len({id(call.exception(PATIENCE_S)) for call in calls}) == 3
        with pytest.raises(WorkerDied) as caught:
            group.role("echo", Echo).noop()
        assert caught.value == error
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        for name in ("group", "rank", "pid", "node", "exitcode", "signal", "log_tail", "running"):
            assert getattr(again, name) == getattr(error, name), name
        group.close()

    @needs(OwnProcess)
    def test_killed_between_calls(self, spawn: Spawn) -> None:
        """A death between calls fails the group, and `close` raises the error if no caller has seen it."""
        group = spawn({"echo": colocate.role(Echo)})
        pids = [pid for pid, _, _ in group.role("echo", Echo).place()]
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: group.state == "failed", "the group has failed")
        with pytest.raises(ExceptionGroup) as caught:
            group.close()
        (error,) = caught.value.exceptions
        assert isinstance(error, WorkerDied)
        assert (error.rank, error.pid, error.signal, error.running) == (0, pids[0], "SIGKILL", None)

    @needs(OwnProcess)
    @smoke
    def test_left(self, spawn: Spawn) -> None:
        """The error about a worker that has exited has the exit code and the last lines of the log."""
        group = spawn({"faulty": colocate.role(Faulty)})
        with pytest.raises(WorkerDied) as caught:
            group.role("faulty", Faulty).exit(7, "these are my last words")
        error = caught.value
        assert (error.rank, error.exitcode, error.signal) == (0, 7, None)
        assert "these are my last words" in str(error.log_tail)
        assert "these are my last words" in str(error)
        assert "exited with code 7" in str(error)

    @needs(OwnProcess)
    def test_crashed(self, spawn: Spawn) -> None:
        """The error about a crash in native code has the Python stack."""
        group = spawn({"faulty": colocate.role(Faulty)}, slots=1)
        with pytest.raises(WorkerDied) as caught:
            group.role("faulty", Faulty).kill(signal.SIGSEGV)
        assert caught.value.signal == "SIGSEGV"
        assert "in kill" in str(caught.value.log_tail)

    @needs(OwnProcess)
    def test_other_groups_live(self, spawn: Spawn) -> None:
        """A worker's death fails only its own group, and other groups' calls that wait for a resident of that group."""
        group = spawn({"faulty": colocate.role(Faulty), "rows": colocate.role(Rows)}, slots=1)
        other = spawn({"rows": colocate.role(Rows), "echo": colocate.role(Echo)}, slots=1)
        with Gate() as gate:
            resident = group.role("faulty", Faulty).wait.keep(gate.address)
            use = other.role("echo", Echo).echo.submit(resident.ref)
            gate.wait_for()
            os.kill(_worker_pid(group), signal.SIGKILL)
            error = use.exception(PATIENCE_S)
            assert isinstance(error, ColocateError)
            assert group.name in str(error)
        assert other.role("rows", Rows).double([1]) == [2]

    @needs(OwnProcess)
    @smoke
    def test_the_pool_lives(self, runtime: Runtime) -> None:
        """The pool of a failed group stays open, and closing the group frees the slots for the next group."""
        with runtime.reserve(1, cpus=0) as pool:
            for _ in range(2):
                group = pool.spawn({"faulty": colocate.role(Faulty)}, name="phoenix")
                with pytest.raises(WorkerDied):
                    group.role("faulty", Faulty).kill()
                group.close()
            assert [slot.state for slot in pool.slots] == ["free"]

    @needs(OwnProcess)
    @pytest.mark.parametrize("how", ["close", "kill", "exit", "hang", "supervisor"])
    def test_children_of_a_worker(self, spawn: Spawn, how: str) -> None:
        """Processes that a role has started end with the worker, in whichever way the worker ends."""
        group = spawn({"parent": colocate.role(Parent), "faulty": colocate.role(Faulty)}, slots=1)
        ((*pids,),) = group.role("parent", Parent).start_children()
        children = Processes(pids)
        with Gate() as gate:
            if how == "close":
                group.close()
            elif how == "kill":
                group.role("parent", Parent).kill.submit().exception(PATIENCE_S)
            elif how == "exit":
                group.role("faulty", Faulty).exit.submit(3, "by os._exit").exception(PATIENCE_S)
            elif how == "hang":
                group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for(1)
                with contextlib.suppress(ExceptionGroup):  # The error says only that the worker hung.
                    group.close(grace=0)
            else:
                os.kill(psutil.Process(_worker_pid(group)).ppid(), signal.SIGKILL)
            children.wait_all()
        children.release_all()


def _worker_pid(group: colocate.ColocatedGroup) -> int:
    pid = group._node.workforce.workers[0].pid
    assert pid is not None
    return pid


ROLES: dict[str, RoleSpec[Any]] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}


class Vanishing(ExecutorCase):
    """Tests of slots that are lost with their machine, and of keepers that don't answer.

    Each test has its own runtime, because one keeper may keep all slots of a driver on a machine.
    """

    @needs(OwnProcess)
    @smoke
    def test_others_take_the_place_of_a_slot_that_has_vanished(self, runtime: Runtime) -> None:
        """The executor reports a vanished slot as lost, so that a restart reserves another slot."""
        with self.connect() as other_runtime, other_runtime.reserve(2, cpus=0) as pool, Gate() as gate:
            group = pool.spawn(ROLES, on_failure="restart", restarts=2)
            before = self.places_of(group)
            executor = other_runtime._node.services.executor
            assert not any(map(executor.is_lost, before))
            call = group.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for(2)
            self.vanish(before[1])
            assert isinstance(call.exception(PATIENCE_S), GroupRestarted)
            group.wait_ready(PATIENCE_S)
            assert group.role("echo", Echo).noop() == [None, None]
            after = self.places_of(group)
            assert not any(map(executor.is_lost, after))
            assert not any(place is before[1] for place in after)

    @needs(OwnProcess)
    @needs_feature("looking")
    def test_a_spare_takes_the_place_of_a_slot_that_has_vanished(self, runtime: Runtime) -> None:
        """A restart replaces a lost slot by a spare slot, unless the spare is lost, too. The other slots stay."""
        with self.connect() as other_runtime, other_runtime.reserve(2, cpus=0, spares=1) as pool:
            group = pool.spawn(ROLES, on_failure="restart", restarts=2)
            executor, slots = other_runtime._node.services.executor, pool._node
            for generation in (1, 2):
                (first, second), (spare,) = self.places_of(group), slots.spares
                self.vanish(second)
                wait_until(partial(executor.is_lost, second), "the slot is lost")
                stays = not executor.is_lost(first) and not executor.is_lost(spare)
                wait_until(partial(_has_generation, group, generation), "it is restarted")
                group.wait_ready(PATIENCE_S)
                assert group.role("echo", Echo).noop() == [None, None]
                if stays:
                    assert slots.places[0] is first
                    assert slots.places[1] is spare
            wait_until(lambda: not other_runtime.audit(), "what is held is there")

    @needs(OwnProcess)
    @needs_feature("looking")
    def test_lost_slots_are_returned(self, runtime: Runtime) -> None:
        """Without restarts, the group of a lost slot fails and can be closed, and the next pool has slots that work."""
        with self.connect() as other_runtime:
            with other_runtime.reserve(2, cpus=0) as pool:
                group = pool.spawn(ROLES)
                (_, place) = self.places_of(group)
                self.vanish(place)
                wait_until(lambda: group.state == "failed", "the group has failed")
                wait_until(lambda: other_runtime._node.services.executor.is_lost(place), "the slot is lost")
                with contextlib.suppress(BaseExceptionGroup):  # The close raises the group's failure once more.
                    group.close()
            with other_runtime.reserve(2, cpus=0) as pool:
                assert pool.spawn(ROLES).role("echo", Echo).noop() == [None, None]
            assert not other_runtime.audit()

    @needs(OwnProcess)
    def test_the_engine_tells_why_a_slot_has_vanished(self, runtime: Runtime) -> None:
        """The error about a lost slot contains the cluster's message, and not only that a connection has ended."""
        if not self.last_words:
            pytest.skip(f"what executor {self.executor!r} says of a slot that vanishes isn't given: set last_words")
        with self.connect() as other_runtime, other_runtime.reserve(1, cpus=0) as pool, Gate() as gate:
            group = pool.spawn(ROLES)
            (place,) = self.places_of(group)
            call = group.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for()
            self.vanish(place)
            error = call.exception(PATIENCE_S)
            assert isinstance(error, WorkerDied)
            assert self.last_words in str(error)

    @needs(OwnProcess)
    def test_stuck_keeper_is_ended(self, runtime: Runtime) -> None:
        """The cluster ends a keeper that can't confirm a kill (`on_stuck`), together with the keeper's workers."""
        with self.connect() as other_runtime:
            pool = other_runtime.reserve(1, cpus=0)
            group = pool.spawn(ROLES)
            pids = [pid for pid, *_ in group.role("echo", Echo).place()]
            (place,) = self.places_of(group)
            with Gate() as gate:
                group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for()
                self.freeze(place)
                workers = Processes(pids)
                with contextlib.suppress(BaseExceptionGroup):  # Another test checks the error about a hung rank.
                    pool.close(grace=0)
            workers.wait_all()
            workers.release_all()
            with other_runtime.reserve(1, cpus=0) as pool:
                assert pool.spawn(ROLES).role("echo", Echo).noop() == [None]


def _has_generation(group: colocate.ColocatedGroup, generation: int) -> bool:
    return group.generation == generation
