"""Faults: the time to close, to report a death, and to end all processes below a killed driver."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil
from tests.bench.rows import Row
from tests.suite.children.probes import Starter

import colocate
from colocate import ChildDied, ColocatedGroup, Runtime
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import Processes

EXECUTORS: Mapping[str, Mapping[str, Any]] = {
    "local": {"processes": True, "cpus": 8},
    "ray": {"cpus": 8},
    "dask": {"cpus": 8},
}
_CLOSES, _KILLS, _DRIVERS, _NODES = 10, 50, 10, 5
_GRACE_S = 0.5
_ROLES = {"faulty": colocate.role(Faulty), "echo": colocate.role(Echo)}
_DRIVER = """
import json, sys, threading
import colocate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
name, options, gate = json.loads(sys.argv[1])
runtime = colocate.connect(name, **options)
group = runtime.reserve(2).spawn({"faulty": colocate.role(Faulty), "echo": colocate.role(Echo)})
group.role("echo").noop()
group.role("faulty").hold_the_gil.options(ranks=[1]).submit(tuple(gate))
threading.Event().wait()
"""
_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=2)
raylet = node.all_processes["raylet"][0].process.pid
print(cluster.address, raylet, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def rows() -> Iterator[Row]:
    for name, options in EXECUTORS.items():
        title = name.capitalize()
        with colocate.connect(name, **options) as runtime:
            for fault, cause in (("hung", _hang), ("holding the GIL", _hold_the_gil), ("stopped", _stop)):
                part = f"{title}: close with a rank that is {fault}, beyond its grace"
                yield from _summary(part, [_closed(runtime, cause) for _ in range(_CLOSES)], 1000.0)
            yield from _killed(f"{title}: SIGKILL of a worker to the error in a waiting call", runtime)
            part = f"{title}: SIGKILL of a role's child to the error in a call that waits for"
            for waits in ("a queue", "the child's answer", "an await"):
                yield from _summary(f"{part} {waits}", list(_child_killed(runtime, waits)), 50.0)
        part = f"{title}: SIGKILL of a driver to the end of all below it, a rank holding the GIL"
        yield from _summary(part, [_driver_killed(name, options) for _ in range(_DRIVERS)], 2000.0)
    yield from _summary(
        "Ray: a raylet killed to the error in a waiting call", [_node_lost() for _ in range(_NODES)], 2000.0
    )


def _summary(part: str, seconds: Sequence[float], bar_ms: float) -> Iterator[Row]:
    yield Row(part, f"median of {len(seconds)}", statistics.median(seconds) * 1e3, "ms")
    yield Row(part, "the slowest", max(seconds) * 1e3, "ms", bar_ms)


def _hang(group: ColocatedGroup, gate: Gate) -> None:
    group.role("faulty", Faulty).wait.options(ranks=[1]).submit(gate.address)
    gate.wait_for()


def _hold_the_gil(group: ColocatedGroup, gate: Gate) -> None:
    group.role("faulty", Faulty).hold_the_gil.options(ranks=[1]).submit(gate.address)
    gate.wait_for()
    gate.open()


def _stop(group: ColocatedGroup, gate: Gate) -> None:
    _hang(group, gate)
    os.kill(group._node.workforce.workers[1].pid or 0, signal.SIGSTOP)


def _closed(runtime: Runtime, cause: Callable[[ColocatedGroup, Gate], None]) -> float:
    pool = runtime.reserve(2)
    group = pool.spawn(_ROLES)
    with Gate() as gate:
        cause(group, gate)
        began = time.perf_counter()
        try:
            pool.close(grace=_GRACE_S)
        except ExceptionGroup:  # the hanging call's error
            pass
        return time.perf_counter() - began - _GRACE_S


def _child_killed(runtime: Runtime, waits: str) -> Iterator[float]:
    with runtime.reserve(1) as pool, pool.spawn({"starter": colocate.role(Starter)}) as group:
        starter = group.role("starter", Starter)
        for _ in range(_KILLS):
            with Gate() as gate:
                pid = starter.serve()
                assert starter.ask(1) == ("", 1)  # the child serves by now
                if waits == "the child's answer":
                    call = starter.ask.submit("hang")
                    time.sleep(0.05)  # by then the call waits
                else:
                    call = (starter.wait if waits == "a queue" else starter.wait_async).submit(gate.address)
                    gate.wait_for()
                began = time.perf_counter()
                os.kill(pid, signal.SIGKILL)
                error = call.exception()
                yield time.perf_counter() - began
                assert isinstance(error, ChildDied), error


def _killed(part: str, runtime: Runtime) -> Iterator[Row]:
    seconds = []
    with runtime.reserve(2) as pool:
        for _ in range(_KILLS):
            group = pool.spawn(_ROLES)
            with Gate() as gate:
                call = group.role("faulty", Faulty).wait.submit(gate.address)
                gate.wait_for(2)
                began = time.perf_counter()
                os.kill(group._node.workforce.workers[1].pid or 0, signal.SIGKILL)
                error = call.exception()
                seconds.append(time.perf_counter() - began)
                assert isinstance(error, colocate.WorkerDied), error
            group.close()
    yield Row(part, f"p50 of {_KILLS}", statistics.median(seconds) * 1e3, "ms", 40.0)
    yield Row(part, "p99", sorted(seconds)[-1 - len(seconds) // 100] * 1e3, "ms", 500.0)


def _driver_killed(name: str, options: Mapping[str, Any]) -> float:
    with Gate() as gate, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        told = json.dumps([name, dict(options), gate.address])
        command = [sys.executable, "-c", _DRIVER, told]
        with subprocess.Popen(command, env={**os.environ, "TMPDIR": folder}) as driver:
            gate.wait_for()
            gate.open()
            processes = Processes(each.pid for each in psutil.Process(driver.pid).children(recursive=True))
            began = time.perf_counter()
            driver.kill()
            processes.wait_all()
            while os.listdir(folder):
                select.select([], [], [], 0.001)
            took = time.perf_counter() - began
            processes.release_all()
            return took


def _node_lost() -> float:
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        env = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([sys.executable, "-c", _CLUSTER], env=env, text=True, **pipes) as cluster:  # type: ignore[call-overload]
            assert cluster.stdout is not None
            address, raylet = cluster.stdout.readline().split()
            try:
                os.environ["RAY_AUTH_MODE"] = "disabled"
                runtime = colocate.connect("ray", address=address)
                pool = runtime.reserve(2, cpus=1, strategy="spread")
                group = pool.spawn(_ROLES)
                with Gate() as gate:
                    call = group.role("faulty", Faulty).wait.submit(gate.address)
                    gate.wait_for(2)
                    began = time.perf_counter()
                    os.kill(int(raylet), signal.SIGKILL)
                    error = call.exception()
                    took = time.perf_counter() - began
                    assert isinstance(error, colocate.WorkerDied), error
                pool.close()
                runtime.close()
            finally:
                del os.environ["RAY_AUTH_MODE"]
            cluster.communicate(timeout=60)
            return float(took)
