"""Stopped or killed processes of a Dask cluster: closing ends, and frees all that can be freed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from tests.closing import ended
from tests.dask.conftest import running, script

import colocate
from colocate import ColocatedGroup, Pool, Runtime
from colocate.errors import ColocateError
from colocate.testing import leaks
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S, Processes, find_starter, send_signal, wait_until

STOPPED_IS_LONG = pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.long), signal.SIGKILL], ids=["stopped", "killed"]
)
SIGNALS = pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])


@pytest.fixture
def cluster() -> Iterator[tuple[str, psutil.Process]]:
    """Start two workers with nannies; yield the address, and the process of the scheduler and the nannies."""
    with leaks.share_between_tests(), running([{"host": "127.0.0.1", "nthreads": 1}] * 2) as address:
        port = int(address.rpartition(":")[2])
        (scheduler,) = (child for child in psutil.Process().children() if port in ports(child))
        everything = [scheduler, *scheduler.children(recursive=True)]
        yield address, scheduler
        for process in [*everything, *(scheduler.children(recursive=True) if scheduler.is_running() else [])]:
            if process.is_running():
                process.kill()


def ports(process: psutil.Process) -> list[int]:
    try:
        found = process.net_connections("inet")
    except psutil.NoSuchProcess:  # another test's child that is just ending
        return []
    return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]


def spawned(runtime: Runtime) -> tuple[Pool, ColocatedGroup, Processes]:
    pool = runtime.reserve(2, cpus=1)
    group = pool.spawn({"echo": colocate.role(Echo)})
    return pool, group, Processes(pid for pid, _, _ in group.role("echo", Echo).place())


@pytest.mark.long
@STOPPED_IS_LONG
def test_scheduler(cluster: tuple[str, psutil.Process], number: signal.Signals) -> None:
    """A pool closes without its scheduler; a stopped scheduler frees the slots when it continues."""
    address, scheduler = cluster
    runtime = colocate.connect("dask", address=address)
    pool, group, workers = spawned(runtime)
    send_signal(scheduler.pid, number)
    if number == signal.SIGSTOP:
        assert group.role("echo", Echo).echo(1) == [1, 1]  # calls don't go through the scheduler
    wrong = ended(pool.close, grace=1.0)
    workers.wait_all()
    workers.release_all()
    assert pool.state == "closed"
    if number == signal.SIGSTOP:
        assert wrong == []
        with pytest.raises(ColocateError, match=r"the Dask scheduler at .* didn't answer in time"):
            runtime.reserve(1)
        send_signal(scheduler.pid, signal.SIGCONT)
        runtime.reserve(2, timeout=PATIENCE_S).close()
    else:
        with pytest.raises(ColocateError, match=rf"the Dask scheduler at {address} is (lost|gone)"):
            runtime.reserve(1)
    ended(runtime.close)


@pytest.mark.long
@pytest.mark.parametrize("away", ["for a moment", pytest.param("for long", marks=pytest.mark.long)])
def test_scheduler_that_is_started_anew(cluster: tuple[str, psutil.Process], away: str) -> None:
    """A runtime reconnects to a restarted scheduler, even after Dask's client gave up, and notices lost workers."""
    address, scheduler = cluster
    with colocate.connect("dask", address=address, timeout=5) as runtime:
        runtime.reserve(2, cpus=1).close()
        connection: Any = runtime._node.services.executor._connection
        client = connection._client
        heard: list[Any] = []
        connection._on_event = heard.append
        send_signal(scheduler.pid, signal.SIGKILL)
        wait_until(lambda: client.status != "running", "it is missed")
        if away == "for long":
            wait_until(lambda: client.status == "closed", "it is given up")
        with running([{"host": "127.0.0.1", "nthreads": 1}] * 2, port=int(address.rpartition(":")[2])):
            wait_until(lambda: client.status != "connecting", "it is found again")
            pool, group, workers = spawned(runtime)
            (pid, *_), *_ = group.role("echo", Echo).place()
            send_signal(find_starter(pid), signal.SIGKILL)
            wait_until(lambda: any("lost" in event for event in heard), "it is told")
            ended(pool.close, grace=0.0)
            workers.wait_all()
            workers.release_all()


@pytest.mark.long
@SIGNALS
def test_killed_driver(cluster: tuple[str, psutil.Process], number: signal.Signals) -> None:
    """A driver that is killed just after one of its Dask workers was stopped or killed leaves no workers."""
    address, _ = cluster
    text = """
    runtime = colocate.connect("dask", address=sys.argv[1])
    group = runtime.reserve(2, cpus=1).spawn({"echo": colocate.role(Echo)})
    print(json.dumps([pid for pid, _, _ in group.role("echo", Echo).place()]), flush=True)
    threading.Event().wait()
    """
    with colocate.connect("dask", address=address) as other, script(text, address) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().strip("[]\n").split(",")]
        workers = Processes(pids)
        send_signal(find_starter(pids[0]), number)
        driver.kill()
        workers.wait_all()
        workers.release_all()
        other.reserve(2, cpus=1, timeout=PATIENCE_S).close()
