"""Existing Ray clusters: joining, several nodes, other drivers, and failures."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray import going
from tests.ray.conftest import tls
from tests.ray.deaths import death_of

import colocate
from colocate import Leaving, Runtime
from colocate.driver import Driver
from colocate.errors import CapabilityError, ClusterError, ColocateError, ConfigError, PlacementError, PlacementTimeout
from colocate.executor import Request
from colocate.gpus import VARIABLE
from colocate.testing.probes.faulty import Parent
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes, send_signal, wait_until

SCRIPT = """
import json, os, sys
import colocate
from colocate.testing.probes.plain import Echo

OPTIONS = json.loads(sys.argv[1])
"""


def script(text: str, cluster: Any, **env: str) -> subprocess.Popen[str]:
    """Start a driver in its own process."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(text), json.dumps(cluster.options)],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def everything_is_free(runtime: Runtime) -> None:
    with runtime.reserve(3, cpus=1, gpus=0, timeout=0), runtime.reserve(3, cpus=0, gpus=1, timeout=0):
        pass


def test_nodes(runtime: Runtime) -> None:
    """Nodes have their own CPUs and GPUs, and two nodes on one machine have different names."""
    nodes = runtime._node.services.executor.nodes()
    assert sorted((node.cpus, node.gpus) for node in nodes) == [(1, 2), (2, 1)]
    assert len({node.name for node in nodes}) == 2


@pytest.mark.long  # test_private.py covers the ranks of a private Ray
@pytest.mark.parametrize("ids", [("0", "1"), ("5", "3")])
def test_ranks_see_assigned_gpus(cluster: Any, ids: tuple[str, str]) -> None:
    """Each rank sees the GPU that Ray gave its actor, by its name on that node, even if Ray sets no variable."""
    variables = {f"RAY_EXPERIMENTAL_NOSET_{VARIABLE}": "1"}
    if ids != ("0", "1"):
        variables[VARIABLE] = ",".join(ids)
    with (
        colocate.connect("ray", **cluster.options, runtime_env={"env_vars": variables}) as runtime,
        runtime.reserve(3, cpus=0, gpus=1) as pool,
    ):
        seen: Any = pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).env(VARIABLE)
        assert seen == [str(device) for slot in pool.slots for device in slot.devices]
        by_node: dict[str, set[str]] = {}
        for name, slot in zip(seen, pool.slots, strict=True):
            by_node.setdefault(slot.node, set()).add(name)
        assert sorted(by_node.values(), key=len) == [{ids[0]}, {*ids}]


def test_killed_by_ray(runtime: Runtime, cluster: Any) -> None:
    """`ray.kill` of a keeper's actor ends its worker, and the children of its roles in any session."""
    with runtime.reserve(1, name="killed") as pool:
        group = pool.spawn({"echo": colocate.role(Echo), "parent": colocate.role(Parent)})
        ((pid, *_),) = group.role("echo", Echo).place()
        family = Processes([pid, *group.role("parent", Parent).start_children()[0]])
        text = """
        import ray
        ray.init(address=OPTIONS["address"], log_to_driver=False, logging_level="ERROR")
        for found in ray.util.list_named_actors(all_namespaces=True):
            if os.environ["KEEPERS"] in found["name"]:
                ray.kill(ray.get_actor(**found))
        """
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": cluster.options["token_file"]}
        with script(text, cluster, **token, KEEPERS=f"{runtime._node.services.id}/keepers-") as stranger:
            assert stranger.wait(PATIENCE_S) == 0
        family.wait_all()
        family.release_all()
        assert death_of(group).rank == 0


def test_spread(runtime: Runtime) -> None:
    """`spread` takes as many nodes as possible, and a resident passes between groups on different nodes."""
    with runtime.reserve(2, cpus=1, strategy="spread") as pool:
        assert len({slot.node for slot in pool.slots}) == 2
        left = pool[0].spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        right = pool[1].spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        with left.first.keep([1, 2]) as kept:
            assert right.first(kept.ref) == [1, 2]


def test_places(runtime: Runtime) -> None:
    """Ray places slots by labels, resources and strict strategies; detachable pools go by labels, too."""
    offers = runtime._node.services.executor.nodes()
    zones = {node.labels["zone"]: node.name for node in offers if "zone" in node.labels}

    def nodes(slots: int, **where: Any) -> list[str]:
        with runtime.reserve(slots, **where) as pool:
            return [slot.node for slot in pool.slots]

    for zone, node in zones.items():
        for detachable in (False, True):
            assert nodes(1, labels={"zone": zone}, detachable=detachable) == [node]
        assert nodes(1, labels={"zone": f"!{zone}"}) != [node]
    assert nodes(1, resources={"disk": 1}) == [zones["b"]]
    assert nodes(2, strategy="strict_pack") == [zones["a"]] * 2
    assert nodes(2, together="zone") == [zones["a"]] * 2
    apart: list[dict[str, Any]] = [{}, {"together": "rack"}]
    for more in apart:
        assert sorted(nodes(2, strategy="strict_spread", **more)) == sorted(zones.values())
    nevers: list[dict[str, Any]] = [{"slots": 2, "labels": {"zone": "b"}}, {"slots": 3, "together": "zone"}]
    for never in nevers:
        with pytest.raises(PlacementError, match="can never fit"):
            runtime.reserve(**never)


def test_without_topologies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray older than 2.60 refuses `together` with CapabilityError, and takes labels."""
    from colocate_ray import placing

    monkeypatch.setattr(placing, "placement_group", lambda bundles, strategy="PACK", bundle_label_selector=None: None)
    with pytest.raises(CapabilityError, match=r"together='zone'\): Ray 2\.60 can"):
        placing._placement_options(Request(2, together="zone"))
    assert placing._placement_options(Request(2, labels={"zone": "a"}, strategy="strict_spread")) == {
        "strategy": "STRICT_SPREAD",
        "bundle_label_selector": [{"zone": "a"}] * 2,
    }


def test_ranks_are_sorted(runtime: Runtime) -> None:
    """Slots are sorted by node and device, and the ranks of a group see the same order."""
    with runtime.reserve(3, gpus=1, cpus=0) as pool:
        places = [(slot.node, slot.devices) for slot in pool.slots]
        nodes = [node.name for node in runtime._node.services.executor.nodes()]
        assert places == sorted(places, key=lambda place: (nodes.index(place[0]), place[1]))
        assert sorted(devices for _, devices in places) == [(0,), (0,), (1,)]
        echo = pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        said: Any = echo.who()
        assert [who["node"] for who in said] == [node for node, _ in places]
        visible: Any = echo.env("CUDA_VISIBLE_DEVICES")
        assert visible == [str(devices[0]) for _, devices in places]


def test_driver_killed_while_waiting_gets_no_slots(cluster: Any, runtime: Runtime) -> None:
    """A driver that is killed while its request waits gets no slots, even if its forked child lives on."""
    with runtime.reserve(3, cpus=1) as everything:
        driver = script(
            """
            import threading
            runtime = colocate.connect("ray", **OPTIONS)
            threading.Thread(target=lambda: runtime.reserve(2, cpus=1, timeout=600), daemon=True).start()
            while not runtime._node.children: os.sched_yield()
            if child := os.fork():
                print(child, flush=True)
            threading.Event().wait()
            """,
            cluster,
        )
        with driver:
            assert driver.stdout is not None
            child = int(driver.stdout.readline())
            driver.kill()
        everything.close()
        with runtime.reserve(3, cpus=1), runtime.reserve(3, gpus=1, cpus=0):
            os.kill(child, signal.SIGKILL)  # the child was still alive


def test_no_ray_by_accident(tmp_path: Path) -> None:
    """A request to an envoy that has left its cluster starts no other Ray."""
    text = """
        from colocate_ray.service import _prepare_environment
        _prepare_environment(None)
        import ray
        from ray.util.placement_group import placement_group

        def actor():
            ray.remote(Echo).options(num_cpus=0).remote()

        for asked in (ray.nodes, actor, lambda: placement_group([{"CPU": 1}])):
            try:
                asked()
            except Exception as error:
                print(type(error).__name__, ray.is_initialized(), flush=True)
        """
    code = SCRIPT.replace("json.loads(sys.argv[1])", "None") + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stderr
    assert all(line.endswith(" False") for line in said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_own_init(cluster: Any) -> None:
    """`auto` joins the cluster of the driver's own `ray.init()`, which still works afterwards."""
    driver = script(
        """
        import ray

        ray.init(address=OPTIONS["address"], log_to_driver=False, logging_level="ERROR")
        with colocate.connect("ray", address="auto") as runtime:
            assert len(runtime._node.services.executor.nodes()) == 2
            with runtime.reserve(1) as pool:
                assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).echo(1) == [1]
        assert ray.get(ray.remote(lambda: 7).remote()) == 7
        """,
        cluster,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=cluster.options["token_file"],
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    with driver:
        assert driver.wait(60) == 0


def test_auto(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` joins the cluster at RAY_ADDRESS, if it is set."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with colocate.connect("ray", address="auto", token_file=cluster.options["token_file"]) as runtime:
        assert len(runtime._node.services.executor.nodes()) == 2


@pytest.mark.long
def test_colocate_is_missing(cluster: Any) -> None:
    """The error names a node where colocate can't be imported, and what to do; nothing stays reserved."""
    env = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent / "without")}}
    with colocate.connect("ray", **cluster.options, runtime_env=env) as runtime:
        with pytest.raises(ColocateError, match=r"colocate can't be imported there .*colocate_ray.holder"):
            runtime.reserve(1)
        with pytest.raises(ColocateError, match=r"on .*runtime_env"):
            runtime.reserve(2, gpus=1, timeout=0)


HOOK = "worker_process_setup_hook"


@pytest.mark.long
@pytest.mark.parametrize(
    ("env", "detachable", "words"),
    [
        ({"working_dir": "file:///nowhere/at_all.zip"}, False, r" names can't be set up there: .*at_all\.zip"),
        pytest.param(
            *({"working_dir": "file:///nowhere/at_all.zip"}, True, r" names can't be set up there: .*at_all\.zip"),
            marks=pytest.mark.long,
        ),
        ({HOOK: "nowhere.at_all"}, False, rf"{HOOK} nowhere.at_all ended with ModuleNotFoundError"),
    ],
)
def test_an_environment_that_fails(cluster: Any, env: dict[str, str], detachable: bool, words: str) -> None:
    """A runtime environment that fails is reported in Ray's last words, not as a missing colocate."""
    with colocate.connect("ray", **cluster.options, runtime_env=env) as runtime:
        with pytest.raises(ColocateError, match=words) as caught:
            runtime.reserve(1, detachable=detachable)
        assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"env_var": {"A": "1"}}, r"Ray knows no 'env_var'; it knows .*env_vars"),
        ({"working_dir": "/nowhere/at_all"}, r"runtime_env=\.\.\.\): directory /nowhere/at_all must be"),
    ],
)
def test_an_environment_that_ray_does_not_take(cluster: Any, env: dict[str, Any], words: str) -> None:
    """An unknown key of `runtime_env` is refused, and so is a value that Ray refuses."""
    with pytest.raises(ConfigError, match=words):
        colocate.connect("ray", **cluster.options, runtime_env=env)


@pytest.mark.long
def test_wrong_token(cluster: Any, tmp_path: Path) -> None:
    """A wrong token is reported as such, with the ways to give the right one."""
    wrong = tmp_path / "token"
    wrong.write_text("cd" * 32)
    with pytest.raises(ConnectionError, match=r"refuses this driver's token.*token_file") as caught:
        colocate.connect("ray", address=cluster.address, token_file=str(wrong))
    assert isinstance(caught.value, ColocateError)


def test_a_cluster_without_tls(cluster: Any, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with certificates learns that the cluster has no TLS; tests/ray/test_tls.py has the reverse."""
    tls(monkeypatch, certificates)
    with pytest.raises(ClusterError, match=r"doesn't talk TLS with this driver .*unset RAY_USE_TLS"):
        colocate.connect("ray", **cluster.options)


def test_unreachable() -> None:
    """An address without a Ray cluster raises ConnectionError; Ray itself would retry for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"no Ray cluster can be reached at .*:{port}") as caught:
        colocate.connect("ray", address=f"localhost:{port}")
    assert isinstance(caught.value, ColocateError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "ray://head:10001"}, r"ray job submit .* needs pip install 'ray\[default\]'"),
        ({"address": "auto", "cpus": 2}, "a cluster has its own"),
        ({"address": "local"}, "leave address out for a private Ray"),
        ({"token_file": "token"}, "a private Ray makes its own"),
    ],
)
def test_refused_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        colocate.connect("ray", **options)


@pytest.mark.long
@pytest.mark.parametrize("detachable", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_head_that_is_stopped(cluster: Any, runtime: Runtime, detachable: bool) -> None:
    """A request to a stopped head fails with its address; when the head continues, nothing is held for that request."""
    (head,) = (
        each for each in psutil.Process(cluster.process.pid).children(recursive=True) if each.name() == "gcs_server"
    )
    send_signal(head.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ClusterError, match=rf"the head .* at {cluster.address} doesn't answer .*still runs"):
            runtime.reserve(3, cpus=1, timeout=0, detachable=detachable)
    finally:
        send_signal(head.pid, signal.SIGCONT)
    runtime.reserve(3, cpus=1, timeout=PATIENCE_S).close()


@pytest.mark.long
def test_a_machine_that_is_silent(cluster: Any, runtime: Runtime) -> None:
    """A silent node blocks no other node's slots, with an owner too; a request that needs the node sees its row."""
    before = _raylets(cluster)
    cluster.tell("add")
    (third,) = _raylets(cluster) - before
    send_signal(third, signal.SIGSTOP)
    try:
        for detachable in (False, True):
            runtime.reserve(2, strategy="spread", detachable=detachable).close()
        with pytest.raises(PlacementTimeout, match="doesn't answer") as caught:
            runtime.reserve(4, timeout=0)
        assert [row["free"] for row in caught.value.nodes].count("doesn't answer") == 1
    finally:
        send_signal(third, signal.SIGCONT)
        cluster.tell("remove")
    everything_is_free(runtime)


def _raylets(cluster: Any) -> set[int]:
    below = psutil.Process(cluster.process.pid).children(recursive=True)
    return {process.pid for process in below if process.name() == "raylet"}


@pytest.mark.long
@pytest.mark.parametrize("grow", [True, pytest.param(False, marks=pytest.mark.long)])
def test_node_lost_before_keepers_is_replaced(cluster: Any, tmp_path: Path, grow: bool) -> None:
    """If a node leaves before its keepers start, the request waits for another; with `grow=False` it never fits."""
    before = _raylets(cluster)
    cluster.tell("add")
    (third,) = _raylets(cluster) - before
    told = tmp_path / str(third)
    told.touch()
    env = {"PYTHONPATH": str(Path(__file__).parent), going.FOLDER: str(tmp_path)}
    with (
        colocate.connect("ray", **cluster.options, runtime_env={HOOK: "going.where_told", "env_vars": env}) as runtime,
        ThreadPoolExecutor(1) as other,
    ):
        reserved = other.submit(runtime.reserve, 4, cpus=1, timeout=PATIENCE_S, grow=grow)
        wait_until(told.with_suffix(".begun").exists, "its keeper is just being made")
        cluster.tell("end")
        if not grow:
            with pytest.raises(PlacementError, match="can never fit"):
                reserved.result()
            return
        cluster.tell("add")
        with reserved.result() as pool:
            assert pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo).noop() == [None] * 4
        cluster.tell("remove")
        assert not runtime.audit()
        everything_is_free(runtime)


@pytest.mark.long
def test_groups_keep_slots_after_node_loss(cluster: Any, runtime: Runtime) -> None:
    """Groups on the other slots of a pool that lost a node keep their slots: nobody else gets them."""
    before = {node.name for node in runtime._node.services.executor.nodes()}
    cluster.tell("add")
    with runtime.reserve(4, cpus=1) as pool:
        groups = {
            slot.node: pool[slot.index : slot.index + 1].spawn({"echo": colocate.role(Echo)}) for slot in pool.slots
        }
        (lost,) = groups.keys() - before
        cluster.tell("remove")
        assert death_of(groups.pop(lost))
        wait_until(lambda: len(runtime._node.services.executor.nodes()) == 2, "Ray itself knows")
        with pytest.raises(PlacementTimeout):
            runtime.reserve(3, cpus=1, timeout=3)
        assert [group.role("echo", Echo).noop() for group in groups.values()] == [[None]] * 2
    everything_is_free(runtime)


@pytest.mark.long
def test_a_drained_node(cluster: Any, runtime: Runtime, tmp_path: Path) -> None:
    """A drained node makes one checkpoint due in a run that has workers there, and isn't reported to others."""
    cluster.tell("add")
    told: list[Leaving] = []
    with runtime.reserve(3, cpus=1, strategy="spread") as pool:
        pool.spawn({"echo": colocate.role(Echo)})
        with colocate.record(runtime, tmp_path / "run", observe=[Noticing(told)]) as run:
            assert run.leaving is None
            assert not run.is_due(1)
            cluster.tell("drain")
            wait_until(lambda: run.is_due(1), "it is noticed")
            assert run.leaving is not None
            assert run.leaving.who in {f"node {slot.node}" for slot in pool.slots}
            assert run.leaving.until == pytest.approx(time.time() + 300, abs=PATIENCE_S)
            with run.checkpoint(1):
                pass
            assert not run.is_due(2)
            assert run.is_due(2, 2)
            left = run.leaving
    assert told == [left]
    with runtime.reserve(1) as pool, colocate.record(runtime, tmp_path / "elsewhere", observe=[Noticing(told)]) as run:
        pool.spawn({"echo": colocate.role(Echo)})
        assert Driver(runtime).executor.leaving()
        assert Driver(runtime).leaving() == {}
    cluster.tell("remove")
    everything_is_free(runtime)


class Noticing:
    def __init__(self, told: list[Leaving]) -> None:
        self.told = told

    def colocate_run_leaving(self, leaving: Leaving) -> None:
        self.told.append(leaving)


@pytest.mark.long
def test_restart_when_another_node_has_come(cluster: Any, runtime: Runtime) -> None:
    """A restart in a full cluster waits for a new node, while groups on the pool's other slots keep working."""
    before = {node.name for node in runtime._node.services.executor.nodes()}
    cluster.tell("add")
    with runtime.reserve(4, cpus=1) as pool:
        (index,) = (slot.index for slot in pool.slots if slot.node not in before)
        group = pool[index : index + 1].spawn({"lasting": colocate.role(Lasting)}, on_failure="restart", restarts=1)
        parts = [pool[each : each + 1] for each in range(4) if each != index]
        others = [part.spawn({"lasting": colocate.role(Lasting)}).role("lasting", Lasting) for part in parts]
        cluster.tell("remove")
        wait_until(lambda: group.state == "restarting", "its worker has died")
        wait_until(lambda: group._node.restarts._missing is not None, "the slot is waited for")
        with pytest.raises(TimeoutError, match="waits for slots in place of lost ones"):
            group.wait_ready(0)
        assert [other.add() for other in others] == [[1]] * 3
        cluster.tell("add")
        group.wait_ready(PATIENCE_S)
        assert group.role("lasting", Lasting).add() == [1]
        assert [other.add() for other in others] == [[2]] * 3
        assert not runtime.audit()
    cluster.tell("remove")
    everything_is_free(runtime)
