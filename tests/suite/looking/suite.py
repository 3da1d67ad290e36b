"""The ownership graph, and audits that compare graph and cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.suite.core.forks import run_in_fork

import colocate
from colocate import Audit, ColocatedGroup, Runtime
from colocate._worker_group.workforce import Worker
from colocate.errors import ForkedError
from colocate.executor import Exit, OwnProcess
from colocate.testing import leaks
from colocate.testing.executors import audits
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.executors.audits import ROLES
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, wait_until


def walk_nodes(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all nodes of a graph."""
    yield data
    for child in data["children"]:
        yield from walk_nodes(child)


def list_shown(runtime: Runtime) -> set[tuple[str, str]]:
    """Return kind and name of everything in the ownership graph."""
    return {(node["kind"], node["name"]) for node in walk_nodes(runtime.graph.data())}


class Graphs(ExecutorCase):
    """`runtime.graph`: the runtime, pools, groups, workers, role instances, residents and calls."""

    @needs_feature("memory")
    def test_memory_in_a_fork(self, pair: ColocatedGroup) -> None:
        """A forked child can render the graph, but a request for memory is refused at once."""
        graph = pair.owner.owner.graph

        def render() -> list[str]:
            for format in ("tree", "json"):
                with pytest.raises(ForkedError, match="forked child"):
                    graph.render(format, memory=True)
            return [str(pair.name in graph.render("tree"))]

        assert run_in_fork(render) == ["True"]

    def test_graph(self, runtime: Runtime) -> None:
        """The graph shows pool, group, workers, roles and residents with states and lines, until the pool closes."""
        with runtime.reserve(2, cpus=0, name="ground") as pool:
            group = pool.spawn({"rows": colocate.role(Rows), "one": colocate.role(Rows).on(slots=[1])}, name="shown")
            resident = group.role("rows", Rows).double.keep([1, 2])
            resident.fetch()
            (ground,) = (node for node in runtime.graph.data()["children"] if node["name"] == "ground")
            assert [(node["kind"], node["name"]) for node in walk_nodes(ground)] == [
                ("pool", "ground"),
                ("group", "shown"),
                ("worker", "0"),
                ("role", "rows rank 0/2"),
                ("worker", "1"),
                ("role", "rows rank 1/2"),
                ("role", "one rank 0/1"),
                ("resident", "rows.double"),
            ]
            assert [node["state"] for node in walk_nodes(ground) if node["kind"] == "worker"] == ["running"] * 2
            lines = [node["line"] for node in walk_nodes(ground) if node["kind"] in ("pool", "group", "resident")]
            assert all("suite.py:" in line for line in lines)
            resident.free()
        assert ("pool", "ground") not in list_shown(runtime)
        assert ("group", "shown") not in list_shown(runtime)

    def test_graph_of_calls(self, pair: ColocatedGroup) -> None:
        """A running call is shown with the rank that it waits for."""
        with Gate() as gate:
            call = pair.role("faulty", Faulty).fail_after.submit([None, gate.address], -1)  # type: ignore[arg-type]
            gate.wait_for()
            calls = [node for node in walk_nodes(pair.owner.owner.graph.data()) if node["kind"] == "call"]
            assert [node["name"] for node in calls] == ["faulty.fail_after"]
            assert "1" in calls[0]["state"]
        call.result(PATIENCE_S)
        assert [node for node in walk_nodes(pair.owner.owner.graph.data()) if node["kind"] == "call"] == []


class Auditing(audits.Auditing):
    """`runtime.audit()`: false when the graph and the cluster agree."""

    def test_clean_while_things_come_and_go(self, runtime: Runtime) -> None:
        """Audits report no difference while groups start and close."""
        audits: list[Audit] = []
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                audits.append(runtime.audit())

        with (
            leaks.share_between_tests()
        ):  # Asked from two threads, a cluster may open one further connection and keep it open.
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

    @needs(OwnProcess)
    def test_unheard_death(self, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker whose exit the driver has missed is reported as missing: an audit asks the cluster itself."""
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
        assert [(item.id, item.pid) for item in audit.missing] == [(victim.boot.worker, victim.pid)]
        heard(victim, unheard[0])
        assert group._node.failure is not None
        wait_until(lambda: all(worker.exit for worker in group._node.workforce.workers), "all workers have gone")
        assert not group.owner.owner.audit()


AREAS = [Graphs, Auditing]
