"""Dask clusters that add workers for waiting reservations, and remove idle workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.clusters import started

import colocate
from colocate import Runtime
from colocate.errors import PlacementError, PlacementTimeout
from colocate.testing.leaks import LeakWatch
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, wait_until
from colocate_dask import reservations

pytest.importorskip("distributed", reason="Dask is not installed")
_WAITS_S = 0.3

Tell = Callable[[str], None]


@pytest.fixture(autouse=True)
def workers_come_and_go(_colocate_watch: LeakWatch) -> None:
    """Exempt the cluster's workers from the leak check."""
    _colocate_watch.shares_engines = True


@pytest.fixture
def cluster() -> Iterator[tuple[Tell, str]]:
    """Start a cluster without workers; yield a function that sends it commands, and its address."""
    command = [sys.executable, str(Path(__file__).with_name("adaptive.py"))]
    with started("dask", command, own_temporary=True, stderr=subprocess.DEVNULL) as (process, options):

        def tell(line: str) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            print(line, file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"

        yield tell, options["address"]


@pytest.fixture
def tell(cluster: tuple[Tell, str]) -> Tell:
    return cluster[0]


@pytest.fixture
def runtime(cluster: tuple[Tell, str]) -> Iterator[Runtime]:
    with colocate.connect("dask", address=cluster[1]) as runtime:
        yield runtime


@pytest.fixture
def client(cluster: tuple[Tell, str]) -> Iterator[Any]:
    from distributed import Client

    made: Any = Client
    with made(cluster[1], set_as_default=False) as client:
        yield client


def workers(client: Any) -> int:
    return len(client.scheduler_info()["workers"])


def waited_for(client: Any) -> int:
    def look(dask_scheduler: Any) -> int:
        return len(reservations._get_plugin(dask_scheduler)._waiting)

    return int(client.run_on_scheduler(look))


def test_adaptive(tell: Tell, runtime: Runtime, client: Any) -> None:
    """An adaptive cluster adds workers for a reservation and for tasks beside it, and removes only unheld workers."""
    tell("adapt 3")
    with runtime.reserve(2) as pool:
        assert workers(client) == 2
        echo = pool.spawn({"echo": colocate.role(Echo)}).role("echo", Echo)
        assert client.submit(sum, [1, 2], pure=False).result(timeout=PATIENCE_S) == 3
        wait_until(lambda: workers(client) == 2, "the worker of tasks goes, and those that are held stay")
        assert echo.noop() == [None, None]
    wait_until(lambda: workers(client) == 0, "those that were freed go")


def test_workers_that_are_just_starting(tell: Tell, runtime: Runtime, client: Any) -> None:
    """A worker that is starting counts toward a waiting reservation; a paused worker doesn't."""

    def targets(dask_scheduler: Any) -> dict[str, int]:
        from distributed import Status

        from colocate_dask import reservations
        from colocate_dask.offers import SlotRequest

        table = reservations._get_plugin(dask_scheduler)
        (worker,) = dask_scheduler.workers.values()
        table._waiting["one"] = SlotRequest("one", "nobody", "", 2, grow=True)
        found = {}
        for status in (Status.init, Status.running, Status.paused):
            worker.status = status
            found[status.name] = table._target_size(0)
        worker.status = Status.running
        del table._waiting["one"]
        return found

    tell("scale 1")
    client.wait_for_workers(1)
    assert client.run_on_scheduler(targets) == {"init": 2, "running": 2, "paused": 3}


@pytest.mark.long
def test_more_than_an_adaptive_cluster_has(tell: Tell, runtime: Runtime, client: Any) -> None:
    """The error says what an adaptive cluster was asked for; with `grow=False`, the pool is refused at once."""
    tell("adapt 1")
    with pytest.raises(PlacementTimeout, match=r"the adaptive cluster was asked for 2 workers, and has a maximum"):
        runtime.reserve(2, timeout=2)
    with pytest.raises(PlacementError, match="can never fit"):
        runtime.reserve(2, grow=False)


@pytest.mark.long
def test_scaled(tell: Tell, runtime: Runtime, client: Any) -> None:
    """A reservation waits for a scaled cluster's workers: for the first by default, for all with `grow=True`."""
    with pytest.raises(PlacementError, match=r"can never fit .*: the Dask cluster at tcp://.* has no workers"):
        runtime.reserve(1, grow=False)
    with pytest.raises(PlacementTimeout, match=r"did not become free within 0\.3 s .*: the Dask cluster at .* has no"):
        runtime.reserve(1, timeout=_WAITS_S)
    with ThreadPoolExecutor(1) as threads:
        for grow, count in ((None, 1), (True, 2)):
            coming = threads.submit(runtime.reserve, count, grow=grow)
            wait_until(lambda: waited_for(client) == 1, "it is waited for")
            tell(f"scale {count}")
            coming.result(PATIENCE_S).close()
    with pytest.raises(PlacementError, match="can never fit"):
        runtime.reserve(3)


def test_workers_that_come_together(tell: Tell, runtime: Runtime, client: Any) -> None:
    """The scheduler asks new workers for their facts in parallel: the first answer of each takes an import."""

    def wait_for_the_second(dask_scheduler: Any) -> None:
        import asyncio

        from colocate_dask import far, reservations, undocumented

        table, call = reservations._get_plugin(dask_scheduler), undocumented.call_worker
        asked = dask_scheduler.asked = []

        async def asks(scheduler: Any, worker: str, function: Any, *args: Any, **how: Any) -> Any:
            asked.append(worker)
            while function is far.describe and len(table._offers_by_worker) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            dask_scheduler.together = len(set(asked)) == 2
            undocumented.call_worker = call
            return await call(scheduler, worker, function, *args, **how)

        undocumented.call_worker = asks

    client.run_on_scheduler(wait_for_the_second)
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(runtime.reserve, 2, grow=True)
        wait_until(lambda: waited_for(client) == 1, "it is waited for")
        tell("scale 1")
        wait_until(lambda: client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.asked), "one is asked")
        tell("scale 2")
        coming.result(PATIENCE_S).close()
    assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.together)
