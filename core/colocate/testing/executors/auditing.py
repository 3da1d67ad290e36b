"""Audits: what the cluster has and no graph owns, and the reverse; and forked children, which own nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

import colocate
from colocate import Audit, ColocatedGroup, RoleSpec, Runtime
from colocate._api.slots import Slots
from colocate._owned.owned import Owned
from colocate._role.budget import Budget
from colocate._worker_group.workforce import Worker
from colocate.errors import ClosedError, RoleStartError
from colocate.executor import Exit, OwnProcess, Reservation
from colocate.testing import leaks
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, of_executor, smoke
from colocate.testing.forking import exit_code, fork
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import FailsToStart, Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, wait_until

ROLES: dict[str, RoleSpec[Any]] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}


@contextmanager
def forgotten(node: Owned) -> Iterator[None]:
    """A block in which a node isn't in the graph, although it lives."""
    assert node.owner is not None
    node.disown()
    try:
        yield
    finally:
        node.owner.children[id(node)] = node


def ids(group: ColocatedGroup) -> set[str]:
    """The ids of a group's workers."""
    return {worker.boot.worker for worker in group._node.workforce.workers}


def found(differences: Any, kind: str) -> set[str]:
    """The ids of what an audit has found of one kind."""
    return {each.id for each in differences if each.kind == kind}


class Auditing(ExecutorCase):
    """`runtime.audit()`: false when the graph and the cluster agree."""

    @smoke
    def test_clean_at_each_stage(self, runtime: Runtime) -> None:
        """Nothing is found before, between and after: reserved, spawned, called, failed to start, closed."""
        assert not runtime.audit()
        with runtime.reserve(2, cpus=0, name="audited") as pool:
            assert not runtime.audit()
            group = pool.spawn(ROLES)
            assert not runtime.audit()
            with Gate() as gate:
                call = group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for(2)
                assert not runtime.audit()
            call.result(PATIENCE_S)
            group.close()
            assert not runtime.audit()
            with pytest.raises(RoleStartError):
                pool.spawn({"bad": colocate.role(FailsToStart, (1,))})
            assert not runtime.audit()
        audit = runtime.audit()
        assert not audit
        assert (audit.leaked, audit.missing) == ((), ())
        assert str(audit) == "clean: nothing is leaked, nothing is missing"

    def test_clean_while_things_come_and_go(self, runtime: Runtime) -> None:
        """What is just starting or closing is no difference."""
        audits: list[Audit] = []
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                audits.append(runtime.audit())

        with leaks.shared():  # asked from two threads, a cluster may open a further connection, which it keeps
            looker = threading.Thread(target=look)
            looker.start()
            try:
                for _ in range(3):
                    with runtime.reserve(2, cpus=0) as pool:
                        pool[0].spawn(ROLES)
                        pool[1].spawn(ROLES).close()
            finally:
                over.set()
                looker.join()
        assert audits
        assert [str(audit) for audit in audits if audit] == []

    @of_executor
    def test_forgotten_group(self, spawn: Spawn) -> None:
        """Workers that run although no group has them are leaked, with what is known of them."""
        group = spawn(ROLES)
        with forgotten(group._node):
            audit = group.owner.owner.audit()
        assert audit
        assert audit.missing == ()
        assert found(audit.leaked, "worker") == ids(group)
        assert {each.kind for each in audit.leaked} == {"worker"}
        assert {(each.id, each.pid) for each in audit.leaked} == {
            (worker.boot.worker, worker.pid) for worker in group._node.workforce.workers
        }
        lines = str(audit).splitlines()
        assert len(lines) == 2
        assert all(line.startswith(f"leaked: worker {group._node.services.id}/{group.name}/") for line in lines)
        assert json.loads(audit.json()) == json.loads(json.dumps(audit.data()))
        assert audit.data()["clean"] is False
        assert not group.owner.owner.audit()

    @of_executor
    def test_claimed_worker(self, spawn: Spawn) -> None:
        """A worker that the graph has and nobody runs is missing, with the line that made its group."""
        group = spawn(ROLES)
        workers = group._node.workforce.workers
        boot = attrs.evolve(workers[0].boot, worker=f"{group._node.services.id}/{group.name}/ghost", slot=2)
        workers.append(attrs.evolve(workers[0], slot=2, boot=boot))
        try:
            audit = group.owner.owner.audit()
        finally:
            workers.pop()
        assert audit.leaked == ()
        (missing,) = audit.missing
        assert (missing.kind, missing.id) == ("worker", boot.worker)
        assert f"worker 2 of group {group.name!r}" in missing.what
        assert "_base.py:" in missing.what
        assert str(audit).startswith("missing: worker ")
        assert not group.owner.owner.audit()

    @of_executor
    def test_claimed_pool(self, runtime: Runtime) -> None:
        """Slots that the graph has and nobody holds are missing."""
        with runtime.reserve(1, cpus=0) as real:
            connection = runtime._node
            ghost = Slots(
                connection, "ghost", attrs.evolve(real._node.request, id=f"{connection.services.id}/ghost"), Budget()
            )
            ghost.reservation = Reservation(real._node.places)
            try:
                audit = runtime.audit()
            finally:
                ghost.disown()
            assert audit.leaked == ()
            (missing,) = audit.missing
            assert (missing.kind, missing.id) == ("reservation", ghost.request.id)
            assert "pool 'ghost' made at " in missing.what
            assert "auditing.py:" in missing.what

    @needs(OwnProcess)
    def test_unheard_death(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker that has died without its driver hearing of it is missing: the cluster itself is asked."""
        group = spawn(ROLES)
        victim = group._node.workforce.workers[1]
        unheard: list[Exit] = []
        heard = Worker.exited

        def deaf(worker: Worker, exit: Exit) -> None:
            unheard.append(exit) if worker is victim else heard(worker, exit)

        monkeypatch.setattr(Worker, "exited", deaf)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: unheard, "the worker has gone")
        audit = group.owner.owner.audit()
        assert audit.leaked == ()
        assert [(each.id, each.pid) for each in audit.missing] == [(victim.boot.worker, victim.pid)]
        heard(victim, unheard[0])
        assert group._node.failure is not None
        wait_until(lambda: all(worker.exit for worker in group._node.workforce.workers), "all workers have gone")
        assert not group.owner.owner.audit()


class Forks(ExecutorCase):
    """A forked child has copies of the driver's objects, and none of its rights."""

    def test_blocks_of_a_fork(self, pair: ColocatedGroup) -> None:
        """A scope, a pipeline and a resident that were open when it was forked: leaving them there does nothing."""
        echo = pair.role("echo", Echo)
        with pair.scope(), echo.first.keep("kept") as kept:
            with pair.pipeline():
                inside = echo.first.submit(kept.ref)
                child = fork()
            if child == 0:  # it has left the pipeline, and ends at the end of the scope, as if by itself
                pass
        if child == 0:
            os._exit(7)
        assert exit_code(child) == 7
        assert inside.result(PATIENCE_S) == "kept"
        with pytest.raises(ClosedError):
            kept.fetch()

    def test_new_runtime_in_a_fork(self, pair: ColocatedGroup) -> None:
        """A forked child may connect for itself."""

        def use_a_new_one() -> list[str]:
            with colocate.connect("local") as runtime, runtime.reserve(1) as pool:
                return pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).echo("from the child")

        assert in_a_fork(use_a_new_one) == ["from the child"]
        assert pair.role("echo", Echo).noop() == [None, None]


def in_a_fork(function: Callable[[], list[str]]) -> list[str]:
    """Return what a function returns in a forked child, as text."""
    read, write = os.pipe()
    child = fork()
    if child == 0:
        try:
            said = json.dumps(function())
        except BaseException:
            said = json.dumps([traceback.format_exc()])
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    exit_code(child)
    with open(read, "rb") as answer:
        found: list[str] = json.loads(answer.read())
    return found
