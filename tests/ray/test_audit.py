"""Audits on an existing cluster use Ray's own tables, not the drivers' memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import colocate
from colocate import Runtime
from colocate.testing.probes.plain import Echo
from colocate_run.cli.cluster import Cluster, find_strays

# A driver that leaves a placement group with an actor, under a name of colocate's, or removes the group.
STRANGER = """
import json, sys
import ray
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

address, what, name = sys.argv[1:]
ray.init(address=address, namespace="audit", log_to_driver=False, logging_level="ERROR")

class Idle:
    def pid(self):
        import os
        return os.getpid()

if what == "leave":
    group = placement_group([{"CPU": 1}], name=name, lifetime="detached")
    assert group.wait(60)
    strategy = PlacementGroupSchedulingStrategy(group, 0)
    actor = ray.remote(Idle).options(name=name + "/0", lifetime="detached", num_cpus=0, scheduling_strategy=strategy)
    print(ray.get(actor.remote().pid.remote()))
else:
    remove_placement_group(get_placement_group(name))
"""


def stranger(cluster: Any, what: str, name: str) -> str:
    """Run that driver to its end; return its output."""
    command = [sys.executable, "-c", STRANGER, cluster.address, what, name]
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": cluster.options["token_file"]}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout


@contextmanager
def left(cluster: Any) -> Iterator[tuple[str, int]]:
    """Leave a placement group of nobody under a name of colocate's; yield its id and its actor's pid."""
    name = f"elsewhere-{uuid.uuid4().hex[:8]}/pool"
    pid = int(stranger(cluster, "leave", f"colocate/{name}"))
    try:
        yield name, pid
    finally:
        stranger(cluster, "take", f"colocate/{name}")


@pytest.mark.long
def test_names(runtime: Runtime) -> None:
    """Placement groups and actors have names with their owner, also in Ray's own tables."""
    with runtime.reserve(2, name="named") as pool:
        owner = runtime._node.services.id
        running = runtime._node.services.executor.running()
        actors = [each for each in running if each.kind == "Ray actor"]
        assert {each.id for each in running if each.kind == "reservation"} == {f"{owner}/named"}
        assert all(each.owner == owner and each.id.startswith(f"{owner}/keepers-") for each in actors)
        assert {each.node for each in actors} >= {slot.node for slot in pool.slots}
        assert all(each.pid is not None and "ray::" in _command(each.pid) for each in actors)


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


@pytest.mark.long
def test_audit_reports_orphaned_placement_group(
    cluster: Any, runtime: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A placement group and actor of a driver that is gone are in another driver's audit and in the command's."""
    with left(cluster) as (name, pid):
        audit = runtime.audit()
        assert audit.missing == ()
        told = {(each.kind, each.id): each for each in audit.leaked}
        assert set(told) == {("reservation", name), ("Ray actor", f"{name}/0")}
        assert told["Ray actor", f"{name}/0"].pid == pid
        assert "made by the job" in told["reservation", name].what
        assert f"leaked: reservation {name} (node " in str(audit)

        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", cluster.options["token_file"])
        assert find_strays(Cluster(executor="ray", address=cluster.address), json=True) == 1
        data = json.loads(capsys.readouterr().out)
        assert data["looked_at"] == ["this machine", f"ray at {cluster.address}"]
        assert {name, f"{name}/0"} <= {each["id"] for each in data["leaked"]}
    assert not runtime.audit()
    find_strays(Cluster(executor="ray", address=cluster.address), json=True)
    assert name not in capsys.readouterr().out


@pytest.mark.long
def test_other_drivers_are_nobodys_strays(cluster: Any, runtime: Runtime) -> None:
    """Reservations and actors of living drivers are in no driver's audit."""
    with colocate.connect("ray", **cluster.options) as other, other.reserve(1) as pool:
        pool.spawn({"echo": colocate.role(Echo)})
        assert not runtime.audit()
        assert not other.audit()
        assert runtime._node.services.executor.strays() == other._node.services.executor.strays() == []
