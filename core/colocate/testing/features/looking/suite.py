"""The ownership graph; audits: what the cluster has and no graph owns, and the reverse."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
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
from colocate.errors import ForkedError, RoleStartError
from colocate.executor import Exit, OwnProcess, Reservation
from colocate.testing import leaks
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature, of_executor, smoke
from colocate.testing.executors.forks import in_a_fork
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import FailsToStart, Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
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


def nodes(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All nodes of a graph."""
    yield data
    for child in data["children"]:
        yield from nodes(child)


def shown(runtime: Runtime) -> set[tuple[str, str]]:
    """Kind and name of everything that the ownership graph shows."""
    return {(node["kind"], node["name"]) for node in nodes(runtime.graph.data())}


class Graphs(ExecutorCase):
    """`runtime.graph`: runtime, pools, groups, workers, role instances; groups' residents and calls."""

    @needs_feature("memory")
    def test_memory_in_a_fork(self, pair: ColocatedGroup) -> None:
        """A forked child can show what it was born with; no worker answers it, and it is told so at once."""
        graph = pair.owner.owner.graph

        def render() -> list[str]:
            for format in ("tree", "json"):
                with pytest.raises(ForkedError, match="forked child"):
                    graph.render(format, memory=True)
            return [str(pair.name in graph.render("tree"))]

        assert in_a_fork(render) == ["True"]

    def test_graph(self, runtime: Runtime) -> None:
        """The graph shows what lives, under its one owner, with states and the lines that made it; then it is gone."""
        with runtime.reserve(2, cpus=0, name="ground") as pool:
            group = pool.spawn({"rows": colocate.role(Rows), "one": colocate.role(Rows).on(slots=[1])}, name="shown")
            kept = group.role("rows", Rows).double.keep([1, 2])
            kept.fetch()
            (ground,) = (node for node in runtime.graph.data()["children"] if node["name"] == "ground")
            assert [(node["kind"], node["name"]) for node in nodes(ground)] == [
                ("pool", "ground"),
                ("group", "shown"),
                ("worker", "0"),
                ("role", "rows rank 0/2"),
                ("worker", "1"),
                ("role", "rows rank 1/2"),
                ("role", "one rank 0/1"),
                ("resident", "rows.double"),
            ]
            assert [node["state"] for node in nodes(ground) if node["kind"] == "worker"] == ["running"] * 2
            made = [node["line"] for node in nodes(ground) if node["kind"] in ("pool", "group", "resident")]
            assert all("suite.py:" in line for line in made)
            kept.free()
        assert ("pool", "ground") not in shown(runtime)
        assert ("group", "shown") not in shown(runtime)

    def test_graph_of_calls(self, pair: ColocatedGroup) -> None:
        """A call under way is shown with the ranks that it waits for."""
        with Gate() as gate:
            call = pair.role("faulty", Faulty).fail_after.submit([None, gate.address], -1)  # type: ignore[arg-type]
            gate.wait_for()
            found = [node for node in nodes(pair.owner.owner.graph.data()) if node["kind"] == "call"]
            assert [node["name"] for node in found] == ["faulty.fail_after"]
            assert "1" in found[0]["state"]
        call.result(PATIENCE_S)
        assert [node for node in nodes(pair.owner.owner.graph.data()) if node["kind"] == "call"] == []


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
            assert "suite.py:" in missing.what

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


AREAS = [Graphs, Auditing]
