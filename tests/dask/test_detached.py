"""Detached pools on Dask: the owner of their Dask workers, the loss of a worker, and a detach that fails."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from distributed import Client
from tests.dask.conftest import running

import colocate
from colocate import Pool, Runtime
from colocate._api.detached import close_detached
from colocate.errors import ClusterError, ConfigError, WorkerDied
from colocate.keeper import Lease, PoolKeepers, list_pools
from colocate.testing import leaks
from colocate.testing.probes.counting import Counting
from colocate.testing.waiting import Processes, send_signal, wait_until
from colocate_run.cli.cluster import Cluster, show_groups


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start three equal workers; yield the cluster's address."""
    with running([{"host": "127.0.0.1", "nthreads": 1}] * 3) as address:
        yield address


@pytest.fixture
def runtime(cluster: str) -> Iterator[Runtime]:
    with colocate.connect("dask", address=cluster) as runtime:
        yield runtime


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def detached(runtime: Runtime, name: str) -> tuple[Pool, list[int], list[str]]:
    """Detach a pool of two slots; return it, its workers' pids, and the addresses of its Dask workers."""
    pool = runtime.reserve(2, cpus=0, detachable=True)
    assert pool._node.reservation is not None
    there = list(pool._node.reservation.handle.slots)
    pids: Any = pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting).pid()
    pool.detach(name, ttl=300)
    return pool, pids, there


def process_of(cluster: str, worker: str) -> int:
    made: Any = Client
    with made(cluster, set_as_default=False) as client:
        return int(client.run(os.getpid, workers=[worker])[worker])


def everything_is_free(runtime: Runtime) -> None:
    with runtime.reserve(3, cpus=0, timeout=60):
        pass


def test_the_lead_is_lost(cluster: str, runtime: Runtime, name: str) -> None:
    """A detached pool that loses its lead keeper is freed at once: nobody could attach it."""
    _, pids, there = detached(runtime, name)
    workers = Processes(pids)
    with leaks.share_between_tests():  # a nanny replaces the Dask worker
        os.kill(process_of(cluster, there[0]), signal.SIGKILL)
        workers.wait_all()
        workers.release_all()
        wait_until(lambda: not runtime.detached(), "it isn't listed any more")
        everything_is_free(runtime)


@pytest.mark.long
def test_another_slot_is_lost(cluster: str, runtime: Runtime, name: str) -> None:
    """A detached pool stays when it loses another slot; a driver that attaches gets WorkerDied, and can close the pool.

    The report comes from the keeper or from the engine, whichever is first.
    """
    _, pids, there = detached(runtime, name)
    worker = Processes(pids[1:])
    with leaks.share_between_tests():  # a nanny replaces the Dask worker
        os.kill(process_of(cluster, there[1]), signal.SIGKILL)
        worker.wait_all()
        worker.release_all()
        with runtime.attach(name, own=True) as mine:
            with pytest.raises(WorkerDied, match=r"keeper can't be had|has left the cluster") as caught:
                mine.groups["counting"].role("counting", Counting).add()
            assert caught.value.rank == 1
        assert runtime.detached() == []
        everything_is_free(runtime)


@pytest.mark.long
def test_the_lead_is_stopped(
    cluster: str, runtime: Runtime, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool whose lead keeper doesn't answer is listed as such, and can be closed by force."""
    monkeypatch.setenv("COLUMNS", "200")
    _, pids, there = detached(runtime, name)
    workers = Processes(pids)
    with leaks.share_between_tests():  # a nanny replaces the Dask worker
        send_signal(process_of(cluster, there[0]), signal.SIGSTOP)
        (found,) = runtime.detached()
        assert (found["name"], found["answers"], found["driver"], found["left_s"]) == (name, False, None, None)
        assert (found["slots"], found["groups"]) == (2, {"counting": ["counting"]})
        assert show_groups(Cluster(executor="dask", address=cluster), json=False) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(name))
        assert "counting (counting)" in line
        assert "(it doesn't answer)" in line
        with pytest.raises(ClusterError, match=f"colocate close {name} --force"):
            close_detached(runtime._node, name, force=False)
        close_detached(runtime._node, name, force=True)
        assert runtime.detached() == []
        workers.wait_all()
        workers.release_all()
        everything_is_free(runtime)


def test_expired_detached_pool_is_freed(cluster: str, runtime: Runtime, name: str) -> None:
    """A detached pool whose time to live is over is freed for everybody."""
    pool = runtime.reserve(2, cpus=0, detachable=True)
    pool.detach(name, ttl=0.1)
    everything_is_free(runtime)
    assert runtime.detached() == []


def test_detached_pool_outlives_client(cluster: str, runtime: Runtime, name: str) -> None:
    """A detached pool keeps its slots when the client that reserved it disconnects; others don't get them."""
    with colocate.connect("dask", address=cluster) as first:
        _, pids, _ = detached(first, name)
    assert runtime._node.services.executor.strays() == []
    with pytest.raises(colocate.PlacementTimeout, match="held by"):
        runtime.reserve(2, cpus=0, timeout=0)
    with runtime.attach(name, own=True) as mine:
        assert mine.groups["counting"].role("counting", Counting).pid() == pids
    everything_is_free(runtime)


@pytest.fixture
def other(cluster: str) -> Iterator[Runtime]:
    with colocate.connect("dask", address=cluster) as runtime:
        yield runtime


def new(runtime: Runtime) -> tuple[Pool, Counting]:
    pool = runtime.reserve(2, cpus=0, detachable=True)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting)


def failing(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Make the next detach call `then` and fail, after all keepers have agreed to it."""
    detach = PoolKeepers.detach

    def fail(keepers: PoolKeepers, lease: Lease) -> None:
        monkeypatch.undo()
        detach(keepers, lease)
        then()
        raise ClusterError("it was told to")

    monkeypatch.setattr(PoolKeepers, "detach", fail)


def test_detached_in_vain(runtime: Runtime, other: Runtime, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detach that fails in its last step leaves the pool with its driver, and others can't attach it."""
    registrations: list[Any] = []
    executor: Any = other._node.services.executor
    failing(monkeypatch, lambda: registrations.append(executor.find_registration(name)))
    pool, view = new(runtime)
    with pytest.raises(ClusterError, match="it was told to"):
        pool.detach(name, ttl=300)
    assert view.add() == [1, 1]
    with pytest.raises(ConfigError, match=f"no pool '{name}' is detached"):
        other.attach(name, own=True)
    assert list_pools(executor._keepers, [registrations[0]]) == []  # also by a registration that was read before
    assert view.add() == [2, 2]
    runtime.close()
    everything_is_free(other)


@pytest.mark.long
def test_worker_dies_while_detached_in_vain(runtime: Runtime, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies during a detach that fails makes its group fail with WorkerDied."""
    pool, view = new(runtime)
    group, pids = pool.groups["counting"], view.pid()

    def end() -> None:
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: group._node.workforce.workers[1].exit is not None, "it is gone")

    failing(monkeypatch, end)
    with pytest.raises(ClusterError, match="it was told to"):
        pool.detach(name, ttl=300)
    assert isinstance(group._node.failure, WorkerDied)
    assert (group._node.failure.signal, group._node.failure.rank) == ("SIGKILL", 1)
    with pytest.raises(WorkerDied):
        view.add()
    pool.close()
