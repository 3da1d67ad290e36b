"""Stopped or killed processes of Ray, and of colocate in Ray: closing ends, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.closing import ended

import colocate
from colocate import Runtime
from colocate.errors import ClusterError, ColocateError, PlacementTimeout
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import Processes, find_starter, send_signal, wait_until
from colocate.worker.birth import supervisor
from colocate_ray import janitor

DRIVER = """
import sys, colocate
from multiprocessing import shared_memory

class Sharing(colocate.Role):
    @colocate.method
    def share(self):
        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        return self.memory.name

runtime = colocate.connect("ray", cpus=2)
names = runtime.reserve(2).spawn({"sharing": colocate.role(Sharing)}).role("sharing", Sharing).share()
envoy = runtime._node.services.executor._envoy
print(envoy._process.pid, envoy.folder, *names, flush=True)
sys.stdin.read()
"""


def envoy(runtime: Runtime) -> Any:
    executor: Any = runtime._node.services.executor
    return executor._envoy


def of_ray(runtime: Runtime, name: str) -> psutil.Process:
    (found,) = (each for each in psutil.Process(envoy(runtime)._process.pid).children() if each.name() == name)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "number"),
    [("gcs_server", signal.SIGKILL), ("raylet", signal.SIGSTOP), ("raylet", signal.SIGKILL)],
    ids=["gcs-killed", "raylet-stopped", "raylet-killed"],
)
def test_engine(name: str, number: signal.Signals) -> None:
    """A private Ray without its control store or raylet still closes, and leaves no process and no folder."""
    runtime = colocate.connect("ray", cpus=2)
    pool = runtime.reserve(2)
    group = pool.spawn({"echo": colocate.role(Echo)})
    workers = Processes(pid for pid, _, _ in group.role("echo", Echo).place())
    everything = Processes(child.pid for child in psutil.Process(envoy(runtime)._process.pid).children(recursive=True))
    send_signal(of_ray(runtime, name).pid, number)
    ended(pool.close, grace=1.0)
    workers.wait_all()
    assert pool.state == "closed"
    ended(runtime.close)
    everything.wait_all()
    assert not Path(envoy(runtime).folder).exists()
    workers.release_all()
    everything.release_all()


@pytest.mark.long
def test_stopped_envoy() -> None:
    """A stopped envoy is ended when the pool closes, with all processes below it."""
    runtime = colocate.connect("ray", cpus=2)
    pool = runtime.reserve(2)
    group = pool.spawn({"echo": colocate.role(Echo)})
    processes = Processes(child.pid for child in psutil.Process(envoy(runtime)._process.pid).children(recursive=True))
    send_signal(envoy(runtime)._process.pid, signal.SIGSTOP)
    assert group.role("echo", Echo).echo(1) == [1, 1]  # calls don't go through the envoy
    assert ended(pool.close) == []
    processes.wait_all()
    processes.release_all()
    with pytest.raises(ColocateError, match="the connection to Ray has ended"):
        runtime.reserve(1)
    assert ended(runtime.close) == []
    assert not Path(envoy(runtime).folder).exists()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.long), signal.SIGKILL], ids=["stopped", "killed"]
)
def test_driver_and_envoy(number: signal.Signals) -> None:
    """A driver that is killed with its envoy, or while that is stopped, leaves no process, folder or shared memory."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Python's trackers print the names that they remove
        text=True,
    ) as driver:
        assert driver.stdout is not None
        pid, folder, *names = driver.stdout.readline().split()
        memory = [Path("/dev/shm", name) for name in names]
        assert [path.exists() for path in memory] == [True, True]
        processes = Processes(child.pid for child in psutil.Process(driver.pid).children(recursive=True))
        send_signal(int(pid), number)
        driver.kill()
        processes.wait_all()
        processes.release_all()
    wait_until(lambda: not Path(folder).exists(), "the folder is gone")
    wait_until(lambda: not any(path.exists() for path in memory), "shared memory is removed")


@pytest.mark.parametrize("tracks", [supervisor.is_tracker, janitor._is_tracker], ids=["supervisor", "janitor"])
def test_resource_trackers_are_recognized_from_start(tracks: Callable[[int], bool]) -> None:
    """A resource tracker is recognized from its start, even before the kernel has executed its program."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        for _ in range(50):
            reads, writes = os.pipe()
            code = f"from multiprocessing.resource_tracker import main;main({reads})"
            command = [each.encode() for each in (sys.executable, "-I", "-S", "-c", code)]
            pid: int = util.spawnv_passfds(command[0], command, [reads])  # as Python starts trackers
            known = tracks(pid)
            os.close(reads)
            os.close(writes)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert known
            assert not tracks(pid)
    finally:
        os.sched_setaffinity(0, processors)


@pytest.fixture
def joined(cluster: Any) -> Iterator[Runtime]:
    with colocate.connect("ray", **cluster.options) as runtime:
        yield runtime


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_envoy_in_a_cluster(cluster: Any, joined: Runtime, number: signal.Signals) -> None:
    """Another driver gets the slots of a stopped or killed envoy, and its own group is undisturbed."""
    with joined.reserve(1, cpus=1) as theirs, colocate.connect("ray", **cluster.options) as runtime:
        other = theirs.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        pool = runtime.reserve(2, cpus=1)
        group = pool.spawn({"echo": colocate.role(Echo)})
        workers = Processes(pid for pid, _, _ in group.role("echo", Echo).place())
        send_signal(envoy(runtime)._process.pid, number)
        ended(pool.close, grace=1.0)
        workers.wait_all()
        workers.release_all()
        words = rf"Ray cluster \(address='{cluster.address}'\) has ended: .*connect again"
        with pytest.raises(ClusterError, match=words):
            runtime.reserve(1)
        with joined.reserve(2, cpus=1):
            assert other.echo(1) == [1]


@pytest.mark.long
def test_an_envoy_that_is_asked_to_end(joined: Runtime) -> None:
    """An envoy ignores SIGTERM, which a batch system sends to all processes: its driver decides when it ends."""
    with joined.reserve(3, cpus=1) as pool:
        echo = pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        send_signal(envoy(joined)._process.pid, signal.SIGTERM)
        with pytest.raises(PlacementTimeout):
            joined.reserve(1, cpus=1, timeout=5)
        assert echo.echo(1) == [1, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_actor_in_a_cluster(joined: Runtime, number: signal.Signals) -> None:
    """A pool whose keeper process is stopped or killed frees its slots as soon as it is closed."""
    pool = joined.reserve(3, cpus=1)
    group = pool.spawn({"echo": colocate.role(Echo)})
    (pid, *_), *_ = group.role("echo", Echo).place()
    actor = find_starter(pid)
    processes = Processes([pid, actor])
    send_signal(actor, number)
    ended(pool.close, grace=0.0)
    processes.wait_all()
    processes.release_all()
    joined.reserve(3, cpus=1, timeout=0).close()
