"""Tests of audits, which find workers and slots that are only in the cluster or only in the ownership graph."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate._api.slots import Slots
from colocate._owned.owned import Owned
from colocate._role.budget import Budget
from colocate.errors import RoleStartError
from colocate.executor import Reservation
from colocate.testing.executors._base import ExecutorCase, Spawn, needs_feature, smoke
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import FailsToStart, Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S

ROLES: dict[str, RoleSpec[Any]] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}


@contextmanager
def forget_node(node: Owned) -> Iterator[None]:
    """A context manager that removes a living node from the ownership graph during the block."""
    assert node.owner is not None
    node.disown()
    try:
        yield
    finally:
        node.owner.children[id(node)] = node


def worker_ids(group: ColocatedGroup) -> set[str]:
    """Return the ids of a group's workers."""
    return {worker.boot.worker for worker in group._node.workforce.workers}


def find_ids(differences: Any, kind: str) -> set[str]:
    """Return the ids of the differences of one kind that an audit has found."""
    return {difference.id for difference in differences if difference.kind == kind}


class Auditing(ExecutorCase):
    """Tests of `runtime.audit()`, whose result is false if the ownership graph and the cluster agree."""

    @smoke
    @needs_feature("looking")
    def test_clean_at_each_stage(self, runtime: Runtime) -> None:
        """An audit finds nothing after each step: reserve, spawn, call, close and a failed start."""
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

    @needs_feature("looking")
    def test_forgotten_group(self, spawn: Spawn) -> None:
        """An audit reports workers that run without a group as leaked."""
        group = spawn(ROLES)
        with forget_node(group._node):
            audit = group.owner.owner.audit()
        assert audit
        assert audit.missing == ()
        assert find_ids(audit.leaked, "worker") == worker_ids(group)
        assert {difference.kind for difference in audit.leaked} == {"worker"}
        assert {(difference.id, difference.pid) for difference in audit.leaked} == {
            (worker.boot.worker, worker.pid) for worker in group._node.workforce.workers
        }
        lines = str(audit).splitlines()
        assert len(lines) == 2
        assert all(line.startswith(f"leaked: worker {group._node.services.id}/{group.name}/") for line in lines)
        assert json.loads(audit.json()) == json.loads(json.dumps(audit.data()))
        assert audit.data()["clean"] is False
        assert not group.owner.owner.audit()

    @needs_feature("looking")
    def test_claimed_worker(self, spawn: Spawn) -> None:
        """An audit reports a worker that is only in the graph as missing, with the line that created the group."""
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

    @needs_feature("looking")
    def test_claimed_pool(self, runtime: Runtime) -> None:
        """An audit reports slots that are only in the graph as missing."""
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
            assert "audits.py:" in missing.what
