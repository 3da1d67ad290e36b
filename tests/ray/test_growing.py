"""A Ray cluster whose autoscaler starts nodes for waiting reservations, and ends idle nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.clusters import NONE_IDLE, SPARING, started

import colocate
from colocate import Runtime
from colocate.errors import PlacementError, PlacementTimeout
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, wait_until

_ENVIRONMENT = {
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # nodes of an autoscaler don't end with it
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    command = [sys.executable, str(Path(__file__).with_name("growing.py"))]
    with (
        started("ray", command, {**SPARING, **NONE_IDLE, **_ENVIRONMENT}) as (_, options),
        colocate.connect("ray", **options) as runtime,
    ):
        yield runtime
        wait_until(lambda: nodes(runtime) == 1, "none is left but the head")


def nodes(runtime: Runtime) -> int:
    return len(runtime._node.services.executor.nodes())


@pytest.mark.long
@pytest.mark.parametrize("detachable", [False, True])
def test_from_none_to_two(runtime: Runtime, detachable: bool) -> None:
    """Nodes are started for pools, also by labels; they stay while a pool has slots there, and end afterwards."""
    assert nodes(runtime) == 1
    reserve = partial(runtime.reserve, cpus=2, labels={"kind": "new"}, timeout=PATIENCE_S, detachable=detachable)
    with reserve() as kept:
        echo = kept.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        with reserve():
            assert nodes(runtime) == 3
        wait_until(lambda: nodes(runtime) == 2, "the one goes that holds nothing")
        assert echo.noop() == [None]
    assert not runtime.audit()
    wait_until(lambda: nodes(runtime) == 1, "so does the other")


@pytest.mark.long
def test_error_has_autoscaler_reason(runtime: Runtime) -> None:
    """The error has the autoscaler's reason; with `grow=False`, a pool that doesn't fit is refused at once."""
    words = (
        r"within 1 s \(Ray's autoscaler has 1 ray\.head\.default, and makes no more: of its types of nodes none would"
    )
    with pytest.raises(PlacementTimeout, match=words) as caught:
        runtime.reserve(1, cpus=3, timeout=1)
    assert len(caught.value.nodes) == 1
    with pytest.raises(PlacementError, match="can never fit"):
        runtime.reserve(1, cpus=1, grow=False)


@pytest.mark.long
def test_where_an_owner_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that must stay is placed on the head node: another node would be kept for it, or ended."""
    from colocate_ray.nodes import Nodes

    address = {"NodeManagerAddress": "", "NodeManagerPort": 1, "NodeManagerHostname": "", "Alive": True}
    head = {"node:__internal_head__": 1.0}
    every = [{**address, "NodeID": f"{each:032}", "Resources": head if each == 50 else {}} for each in range(100)]
    monkeypatch.setattr("ray.nodes", lambda: every)
    monkeypatch.setattr("colocate_ray.silence.find_answering", lambda servers, within_s: set(servers))
    assert Nodes().choose_answering(stays=True) == f"{50:032}"


def test_autoscaler_reports_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`read_autoscaler` reads the reports of both autoscaler generations, and returns None without an autoscaler."""
    from ray._private import worker
    from ray.autoscaler._private.autoscaler import AutoscalerSummary
    from ray.autoscaler._private.node_provider_availability_tracker import (
        NodeAvailabilityRecord,
        NodeAvailabilitySummary,
        UnavailableNodeInformation,
    )
    from ray.autoscaler.v2 import schema, sdk

    from colocate_ray.growing import read_autoscaler

    report: dict[str, Any] = {}
    status: Any = schema.ClusterStatus()
    store = SimpleNamespace(internal_kv_get=lambda key, namespace: json.dumps(report) if report else None)
    monkeypatch.setattr(worker.global_worker, "gcs_client", store, raising=False)
    context = SimpleNamespace(gcs_address="")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(sdk, "get_cluster_status", lambda address: status)
    assert read_autoscaler() is None

    why = UnavailableNodeInformation("OutOfCapacity", "none left")
    availability = NodeAvailabilitySummary({"big": NodeAvailabilityRecord("big", False, 0.0, why)})
    said: Any = AutoscalerSummary(
        active_nodes={"head": 1},
        idle_nodes=None,
        pending_nodes=[("10.0.0.1", "cpu", "setting-up")],
        pending_launches={"cpu": 2},
        failed_nodes=[("10.0.0.2", "cpu")],
        node_availability_summary=availability,
    )
    report["autoscaler_report"] = asdict(said)
    found = read_autoscaler()
    assert found is not None
    assert found.describe == (
        "Ray's autoscaler has 1 head, and waits for 3 cpu; a node cpu failed; no big is to be had: none left"
    )
    report["autoscaler_report"] |= {"active_nodes": {"node_12ab": 1}, "pending_nodes": [], "pending_launches": {}}
    assert read_autoscaler() is None
    nodes: dict[str, int] = report["autoscaler_report"]["active_nodes"]
    nodes.clear()  # an autoscaler that has seen no node yet, not even the head
    monkeypatch.setattr("colocate_ray.growing.time.sleep", lambda seconds: nodes.update(head=1))
    assert read_autoscaler() is None  # the head isn't seen yet
    found = read_autoscaler(within_s=60)
    assert found is not None
    assert found.nodes == {"head": 1}

    # The first status of a cluster that has just started has no report.
    first = report.pop("autoscaler_report")
    report["monitor_pid"] = 1
    assert read_autoscaler() is None
    monkeypatch.setattr("colocate_ray.growing.time.sleep", lambda seconds: report.update(autoscaler_report=first))
    found = read_autoscaler(within_s=60)
    assert found is not None
    assert found.nodes == {"head": 1}

    report.clear()
    node = partial(schema.NodeInfo, "", instance_id="", ip_address="", node_status="IDLE")
    launch: Any = schema.LaunchRequest("", "cpu", 2, schema.LaunchRequest.Status.PENDING, 0)
    status.idle_nodes.append(node(ray_node_type_name="headgroup", node_id=""))
    status.pending_launches.append(launch)
    status.failed_launches.append(replace(launch, details="no quota"))
    assert read_autoscaler() is None  # a status without a version is no autoscaler's
    status.stats.autoscaler_version = "7"
    found = read_autoscaler()
    assert found is not None
    assert found.describe == (
        "Ray's autoscaler has 1 headgroup, and waits for 2 cpu; 2 cpu couldn't be launched: no quota"
    )
