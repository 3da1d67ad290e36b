"""Existing Dask clusters: a runtime holds workers exclusively, and leaves the rest of the cluster unchanged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import distributed
import psutil
import pytest
from distributed import Status
from tests.chaos import sockets
from tests.closing import ended
from tests.dask.conftest import planted, running, script

import colocate
from colocate import Leaving, Pool, Runtime
from colocate.driver import Driver
from colocate.errors import PlacementError, PlacementTimeout, WorkerDied
from colocate.testing import leaks
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes, send_signal, wait_until
from colocate_dask import undocumented
from colocate_run.cli.cluster import Cluster, find_strays


def by_status(client: Any) -> dict[str, str]:
    def look(dask_scheduler: Any) -> dict[str, str]:
        return {address: state.status.name for address, state in dask_scheduler.workers.items()}

    found: dict[str, str] = client.run_on_scheduler(look)
    return found


def statuses(client: Any) -> list[str]:
    return sorted(by_status(client).values())


def places(pool: Pool) -> list[tuple[str, tuple[int, ...]]]:
    return [(slot.node, slot.devices) for slot in pool.slots]


def echo(pool: Pool) -> Echo:
    return pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)


def everything_is_free(runtime: Runtime, timeout: float = 0) -> None:
    with runtime.reserve(5, cpus=0, timeout=timeout):
        pass


def test_nodes(runtime: Runtime) -> None:
    """Each address is a node, with the CPUs and GPUs of its workers."""
    nodes = [(node.name, node.cpus, node.gpus) for node in runtime._node.services.executor.nodes()]
    assert nodes == [("127.0.0.1", 4, 0), ("127.0.0.2", 6, 4)]


def test_sockets(cluster: str, other: Any) -> None:
    """`find_sockets` finds a Dask client's connections to the scheduler, which Dask doesn't document."""
    sockets = undocumented.find_sockets(other)
    assert {"tcp://{}:{}".format(*sock.getpeername()) for sock in sockets} == {cluster}
    assert len(sockets) >= 2  # its stream, and its requests' connections


@pytest.mark.long
def test_connections(runtime: Runtime) -> None:
    """A request that runs beside another one leaves no extra connection."""
    executor: Any = runtime._node.services.executor
    connection = executor._connection

    async def slow(dask_scheduler: Any) -> None:
        import asyncio

        await asyncio.sleep(1.5)

    with leaks.share_between_tests():  # the first request opens the pool's one connection, which stays
        connection.run_on_scheduler(slow)  # meanwhile, the scheduler is pinged
    assert len(undocumented.find_sockets(connection._client)) == 2


def test_pack_and_spread(runtime: Runtime) -> None:
    """`pack` takes as few nodes as possible, `spread` as many; ranks are sorted by node."""
    with runtime.reserve(2, cpus=2, strategy="pack") as pool:
        assert places(pool) == [("127.0.0.1", ())] * 2
    with runtime.reserve(2, cpus=2, strategy="spread") as pool:
        assert places(pool) == [("127.0.0.1", ()), ("127.0.0.2", ())]
    with runtime.reserve(3, cpus=0) as pool:
        assert places(pool) == [("127.0.0.2", ())] * 3


def test_places(runtime: Runtime) -> None:
    """Slots are placed by a Dask worker's name, host and resources; all on one host, or each on its own."""
    big: list[dict[str, Any]] = [
        {"labels": {"name": "big"}},
        {"resources": {"disk": 1}},
        {"labels": {"host": "127.0.0.2"}},
    ]
    for where in big:
        with runtime.reserve(1, cpus=2, **where) as pool:
            assert places(pool) == [("127.0.0.2", ())]
    with runtime.reserve(2, cpus=1, labels={"name": "!big"}, strategy="strict_spread") as pool:
        assert places(pool) == [("127.0.0.1", ()), ("127.0.0.2", ())]
    whole: list[dict[str, Any]] = [{"strategy": "strict_pack"}, {"together": "host"}]
    for where in whole:
        with runtime.reserve(2, cpus=2, **where) as pool:
            assert places(pool) == [("127.0.0.1", ())] * 2
    with pytest.raises(PlacementError, match=r"on nodes with name=bug, can never fit \(a slot takes") as caught:
        runtime.reserve(1, labels={"name": "bug"})
    assert caught.value.nodes[1]["labels"].startswith("name=big|tcp://127.0.0.2:")


def test_gpus(runtime: Runtime) -> None:
    """A dask-cuda worker has its own GPU, another worker those that it declares; a role sees only its slot's GPUs."""
    with runtime.reserve(3, gpus=1, cpus=1) as pool:
        assert places(pool) == [("127.0.0.2", (0,)), ("127.0.0.2", (6,)), ("127.0.0.2", (7,))]
        assert echo(pool).env("CUDA_VISIBLE_DEVICES") == ["0", "6", "7"]
    with runtime.reserve(1, gpus=2, cpus=1) as pool:
        assert places(pool) == [("127.0.0.2", (0, 1))]
        with pytest.raises(PlacementTimeout):
            runtime.reserve(3, gpus=1, cpus=1, timeout=0)


def test_never_fits(runtime: Runtime) -> None:
    """A request that can never fit is refused at once, with a row for each node, and nothing stays pending."""
    for slots, cpus, gpus in ((6, 0, 0), (1, 5, 0), (2, 0, 2), (4, 0, 1)):
        with pytest.raises(PlacementError, match="can never fit") as caught:
            runtime.reserve(slots, cpus=cpus, gpus=gpus, timeout=1e6)
        assert not isinstance(caught.value, PlacementTimeout)
        assert [row["node"] for row in caught.value.nodes] == ["127.0.0.1", "127.0.0.2"]
    with pytest.raises(PlacementError, match=r"2\.0 GiB"):  # one worker has a limit of 1 GiB; the others have none
        runtime.reserve(5, cpus=0, host_memory="2GiB")
    everything_is_free(runtime)


@pytest.mark.long
def test_a_stopped_worker(cluster: str, runtime: Runtime, other: Any) -> None:
    """A stopped Dask worker isn't free: a request that needs it fails with its name, and succeeds once it continues."""
    everything_is_free(runtime)  # all workers are known from now on
    pids = other.run(os.getpid)
    worker, pid = next((address, pid) for address, pid in sorted(pids.items()) if "127.0.0.1" in address)
    with colocate.connect("dask", address=cluster) as driver:  # a driver with its own connections
        send_signal(pid, signal.SIGSTOP)
        try:
            with pytest.raises(PlacementTimeout, match=f"1 that doesn't answer: {worker}"):
                driver.reserve(5, cpus=0, timeout=0)
            with driver.reserve(4, cpus=0, timeout=0) as pool:
                assert echo(pool).noop() == [None] * 4
        finally:
            send_signal(pid, signal.SIGCONT)
        driver.reserve(5, cpus=0, timeout=PATIENCE_S).close()


def test_tasks_of_others(runtime: Runtime, other: Any) -> None:
    """Held workers get no tasks, and workers with others' data can't be reserved; afterwards all workers run tasks."""
    with runtime.reserve(4, cpus=0, name="four"):
        assert statuses(other) == ["paused"] * 4 + ["running"]
        data = other.submit(lambda: 42, pure=False)
        assert data.result(timeout=PATIENCE_S) == 42
        with pytest.raises(PlacementTimeout, match="with data of others"):
            runtime.reserve(1, cpus=0, timeout=0)
    assert statuses(other) == ["running"] * 5
    with pytest.raises(PlacementTimeout):
        runtime.reserve(5, cpus=0, timeout=0)
    assert data.result(timeout=PATIENCE_S) == 42
    del data
    everything_is_free(runtime, timeout=PATIENCE_S)  # the request waits until the data is freed
    assert sorted(set(other.gather(other.map(lambda x: x % 3, range(50), pure=False)))) == [0, 1, 2]


def test_held_workers_are_not_idle(runtime: Runtime, other: Any) -> None:
    """Held workers count as busy: an idle scheduler doesn't end, and an adaptive cluster doesn't close them."""

    def look(dask_scheduler: Any) -> tuple[bool, int]:
        for _ in range(2):  # the first may find that there was something to do before
            idle = dask_scheduler.check_idle() is not None
        return idle, len(dask_scheduler.workers_to_close(n=len(dask_scheduler.workers)))

    assert other.run_on_scheduler(look) == (True, 5)
    with runtime.reserve(4, cpus=0):
        assert other.run_on_scheduler(look) == (False, 1)
    assert other.run_on_scheduler(look) == (True, 5)


def test_a_held_worker_that_was_short_of_memory(runtime: Runtime, other: Any) -> None:
    """A held worker stays paused when it reports that it has memory again."""

    def change(status: str, dask_worker: Any) -> None:
        dask_worker.status = Status[status]

    def told(worker: str) -> list[str]:
        return [event.get("status") for _, event in other.get_events(worker)]

    with runtime.reserve(4, cpus=0):
        held = next(address for address, status in by_status(other).items() if status == "paused")
        before = told(held).count("running")
        for status in ("paused", "running"):
            other.run(change, status, workers=[held])
        wait_until(lambda: told(held).count("running") > before, "the scheduler has heard of it")
        assert statuses(other) == ["paused"] * 4 + ["running"]
    assert statuses(other) == ["running"] * 5


def test_share(cluster: str, other: Any) -> None:
    """With `share=True`, a runtime uses workers that serve others, and they keep serving."""
    data = other.map(lambda x: x, range(10), pure=False)
    other.gather(data)
    with (
        colocate.connect("dask", address=cluster, share=True) as runtime,
        runtime.reserve(5, cpus=0, timeout=0) as pool,
    ):
        assert statuses(other) == ["running"] * 5
        assert echo(pool).noop() == [None] * 5
        assert other.submit(lambda: 1, pure=False).result(timeout=PATIENCE_S) == 1
    assert other.gather(data) == list(range(10))


def test_with_a_client(other: Any, runtime: Runtime) -> None:
    """A runtime that connects by a Dask client leaves that client open."""
    with colocate.connect("dask", client=other) as joined, joined.reserve(1, cpus=0, timeout=PATIENCE_S) as pool:
        assert echo(pool).noop() == [None]
        assert statuses(other).count("paused") == 1
    assert other.submit(lambda: 1, pure=False).result(timeout=PATIENCE_S) == 1
    everything_is_free(runtime, timeout=PATIENCE_S)


def test_killed_waiting_driver_gets_no_slots(cluster: str, runtime: Runtime) -> None:
    """A driver that is killed while its request waits gets no slots when some become free: others do."""
    with runtime.reserve(5, cpus=0) as everything:
        driver = script(
            """
            runtime = colocate.connect("dask", address=sys.argv[1])
            threading.Thread(target=lambda: runtime.reserve(1, cpus=0, timeout=600), daemon=True).start()
            while not runtime._node.children: os.sched_yield()
            print("waits", flush=True)
            threading.Event().wait()
            """,
            cluster,
        )
        with driver:
            assert driver.stdout is not None
            try:
                assert driver.stdout.readline() == "waits\n"
                wait_until(lambda: waiting(runtime) == 1, "the scheduler has its request")
            finally:
                driver.kill()
        wait_until(lambda: waiting(runtime) == 0, "the scheduler has forgotten it")
        everything.close()
        everything_is_free(runtime, timeout=PATIENCE_S)


def waiting(runtime: Runtime) -> int:
    def count(dask_scheduler: Any) -> int:  # sent by value: this module can't be imported there
        from colocate_dask import reservations

        return len(reservations._get_plugin(dask_scheduler)._waiting)

    executor: Any = runtime._node.services.executor
    found: int = executor._connection.run_on_scheduler(count)
    return found


@pytest.mark.long
def test_audit_lists_reservation_of_lost_client(
    cluster: str, runtime: Runtime, other: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reservation of a client that is gone is in every driver's audit and in the command's, with its Dask worker."""
    with planted(other, "elsewhere-7-1/lost") as worker:
        audit = runtime.audit()
        assert audit.missing == ()
        (leaked,) = audit.leaked
        assert (leaked.kind, leaked.id) == ("reservation", "elsewhere-7-1/lost")
        assert "Client-that-is-gone" in leaked.what
        assert worker in leaked.what
        assert leaked.since is not None
        assert find_strays(Cluster(executor="dask", address=cluster), json=True) == 1
        data = json.loads(capsys.readouterr().out)
        assert data["looked_at"] == ["this machine", f"dask at {cluster}"]
        assert "elsewhere-7-1/lost" in {each["id"] for each in data["leaked"]}
    assert not runtime.audit()


def test_nanny(cluster: str, runtime: Runtime, other: Any, tmp_path: Path) -> None:
    """A killed nanny takes its Dask worker and the worker on it along, and the group fails at that rank."""
    options = ["--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1", "--local-directory", str(tmp_path)]
    command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster, *options]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as nanny:
        try:
            other.wait_for_workers(6, timeout=PATIENCE_S)
            pool = runtime.reserve(6, cpus=0)
            group = pool.spawn({"echo": colocate.role(Echo)})
            pids = [pid for pid, _, _ in group.role("echo", Echo).place()]
            workers = Processes(pids)
            (there,) = (
                rank for rank, pid in enumerate(pids) if nanny.pid in (p.pid for p in psutil.Process(pid).parents())
            )
        finally:
            nanny.kill()
        wait_until(lambda: group._node.failure is not None, "the group fails")
        assert isinstance(group._node.failure, WorkerDied)
        assert group._node.failure.rank == there
        ended(pool.close, grace=0.0)
        workers.wait_all()
        workers.release_all()
        everything_is_free(runtime, timeout=PATIENCE_S)


@pytest.mark.long
def test_workers_that_retire(tmp_path: Path) -> None:
    """A run is notified of a Dask worker that retires, at the end of its lifetime or because it is closed."""

    def retire(host: str, dask_scheduler: Any) -> None:
        for state in dask_scheduler.workers.values():
            if state.host == host:
                dask_scheduler.handle_worker_status_change("closing_gracefully", state, "test")

    workers = [{"host": "127.0.0.1", "nthreads": 1, "lifetime": "5 minutes"}, {"host": "127.0.0.2", "nthreads": 1}]
    with running(workers) as address, colocate.connect("dask", address=address) as own:
        own.reserve(2, cpus=0).spawn({"echo": colocate.role(Echo)})
        with colocate.record(own, tmp_path / "run") as run:
            wait_until(lambda: run.leaving is not None, "it is noticed")
            first = run.leaving
            assert first is not None
            assert first.who == "node 127.0.0.1"
            assert first.until == pytest.approx(time.time() + 300, abs=PATIENCE_S)
            assert run.is_due(1)
            with distributed.Client(address, set_as_default=False) as client:  # type: ignore[no-untyped-call]
                client.run_on_scheduler(retire, host="127.0.0.2")
                wait_until(lambda: run.leaving != first, "so is the other")
            assert run.leaving == Leaving("node 127.0.0.2", None)


@pytest.mark.long
def test_repeated_requests_are_not_logged(tmp_path: Path) -> None:
    """A runtime's repeated requests, for leaving workers and for signs of life, leave no line in Dask's log."""

    async def slow(dask_scheduler: Any) -> None:
        import asyncio

        await asyncio.sleep(1.5)

    def lines() -> int:
        return (tmp_path / "log").read_text().count("Run out-of-band function")

    with (
        (tmp_path / "log").open("w") as log,
        running([{"host": "127.0.0.1"}], stderr=log.fileno()) as address,
        colocate.connect("dask", address=address) as own,
        own.reserve(1, cpus=0) as pool,
    ):
        pool.spawn({"echo": colocate.role(Echo)})
        before, executor = lines(), Driver(own).executor
        assert before, "who asks once is logged, as ever"
        for _ in range(10):
            assert executor.leaving() == {}
        executor._connection.run_on_scheduler(slow)
        assert lines() == before


@pytest.mark.long
def test_a_lost_slot_may_be_had_again(tmp_path: Path) -> None:
    """A group whose keeper is lost restarts on the same Dask worker, which is still alive."""
    with running([{"host": "127.0.0.1", "nthreads": 1}]) as address, colocate.connect("dask", address=address) as own:
        pool = own.reserve(1, cpus=0, regrow_timeout=PATIENCE_S)
        group = pool.spawn({"lasting": colocate.role(Lasting)}, on_failure="restart")
        lasting = group.role("lasting", Lasting)
        assert lasting.add() == [1]
        group.checkpoint(tmp_path / "here", tag=1)
        sockets.drop("keeper", own, group, 0)
        wait_until(lambda: group.generation == 1, "it is restarted")
        assert group.wait_ready(PATIENCE_S) == 1
        assert lasting.add() == [2]
