"""Detached pools whose driver and another one are at them at the same time: only one of them has it afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import colocate
from colocate import Pool, Runtime
from colocate.errors import ConfigError, EngineError, WorkerDied
from colocate.keeper import Lease, PoolKeepers, listed
from colocate.testing.probes.counting import Counting
from colocate.testing.waiting import PATIENCE_S, wait_until


@pytest.fixture
def other(cluster: str) -> Iterator[Runtime]:
    with colocate.connect("dask", address=cluster) as runtime:
        yield runtime


def new(runtime: Runtime) -> tuple[Pool, Counting]:
    pool = runtime.reserve(2, cpus=0, detachable=True)
    return pool, pool.spawn({"counting": colocate.role(Counting)}, name="counting").role("counting", Counting)


def counting(pool: Pool) -> Counting:
    return pool.groups["counting"].role("counting", Counting)


def failing(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Have the next detach fail when all keepers have agreed to it, after something else."""
    detach = PoolKeepers.detach

    def fail(keepers: PoolKeepers, lease: Lease) -> None:
        monkeypatch.undo()
        detach(keepers, lease)
        then()
        raise EngineError("it was told to")

    monkeypatch.setattr(PoolKeepers, "detach", fail)


def everything_is_free(runtime: Runtime) -> None:
    with runtime.reserve(3, cpus=0, timeout=PATIENCE_S):
        pass


def test_detached_in_vain(runtime: Runtime, other: Runtime, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detach that fails in its last step leaves the pool to its driver, and to nobody else."""
    registrations: list[Any] = []
    executor: Any = other._node.services.executor
    failing(monkeypatch, lambda: registrations.append(executor.registration(name)))
    pool, view = new(runtime)
    with pytest.raises(EngineError, match="it was told to"):
        pool.detach(name, ttl=300)
    assert view.add() == [1, 1]
    with pytest.raises(ConfigError, match=f"no pool '{name}' is detached"):
        other.attach(name, own=True)
    assert listed(executor._keepers, [registrations[0]]) == []  # also for who knows it from before
    assert view.add() == [2, 2]
    runtime.close()
    everything_is_free(other)


@pytest.mark.long
def test_worker_dies_while_detached_in_vain(runtime: Runtime, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it hasn't been told of because the pool was as good as detached, the driver is told of then."""
    pool, view = new(runtime)
    group, pids = pool.groups["counting"], view.pid()

    def end() -> None:
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: group._node.workforce.workers[1].exit is not None, "it is gone")

    failing(monkeypatch, end)
    with pytest.raises(EngineError, match="it was told to"):
        pool.detach(name, ttl=300)
    assert isinstance(group._node.failure, WorkerDied)
    assert (group._node.failure.signal, group._node.failure.rank) == ("SIGKILL", 1)
    with pytest.raises(WorkerDied):
        view.add()
    pool.close()
