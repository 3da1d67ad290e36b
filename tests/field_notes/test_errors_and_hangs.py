"""What others have hit when something goes wrong, and why it can't happen here. Numbers are verl's unless named."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Role, Runtime, WorkerDied, method
from colocate.errors import CallTimeout, PlacementError, RoleError, RoleStartError
from colocate.executor import Node, Request
from colocate.placement import Ledger
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.faulty import FailsToStart, Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S

ROLES: dict[str, Any] = {"echo": colocate.role(Echo), "faulty": colocate.role(Faulty)}


def test_the_root_cause_is_swallowed_or_the_job_hangs_after_one_rank_failed(on_processes: Runtime) -> None:
    """ "The root cause is swallowed, or the job hangs after one rank failed": #275, #2987, #5750, #7180.

    One rank raises before a collective in which the other waits: its error comes, with the original as the cause, and
    the other one is freed.
    """
    pytest.importorskip("torch")
    with on_processes.reserve(2) as pool:
        ring = pool.spawn({"ring": colocate.role(Collective)}).role("ring", Collective)
        assert ring.sum(1.0) == [2.0, 2.0]
        with pytest.raises(RoleError, match="rank 1 left before the collective") as caught:
            ring.sum_unless(1.0, 1)
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, ValueError)
        assert ring.sum(2.0) == [4.0, 4.0]


def test_a_ray_call_on_a_hung_actor_waits_for_ever(runtime: Runtime) -> None:
    """ "A Ray call on a hung actor waits for ever".

    A call with a timeout ends, says where the rank hangs, and whoever waits for a later one is told too.
    """
    check_hung(runtime)


def test_dask_may_wait_minutes(on_dask: Runtime) -> None:
    """ "Dask may wait minutes".

    For a worker that hangs no longer than the call's timeout, and for one that was killed not at all.
    """
    check_hung(on_dask)
    with on_dask.reserve(1, cpus=0) as pool:
        group = pool.spawn(ROLES)
        with Gate() as gate:
            call = group.role("faulty", Faulty).wait.submit(gate.address)  # type: ignore[attr-defined]
            gate.wait_for()
            os.kill(pid_of(group), signal.SIGKILL)
            error = call.exception(PATIENCE_S)
        assert isinstance(error, WorkerDied)
        assert error.signal == "SIGKILL"


def check_hung(runtime: Runtime) -> None:
    with runtime.reserve(1, cpus=0) as pool, Gate() as gate:
        group = pool.spawn(ROLES)
        faulty: Any = group.role("faulty")
        call = faulty.wait.options(timeout=2.0).submit(gate.address)
        gate.wait_for()
        error = call.exception(PATIENCE_S)
        assert isinstance(error, CallTimeout)
        assert "pass_gate" in error.stacks[0]
        gate.open()
        assert group.role("echo", Echo).noop() == [None]


def pid_of(group: ColocatedGroup) -> int:
    pid = group._node.workforce.workers[0].pid
    assert pid is not None
    return pid


def test_constructor_failures_surface_at_the_first_method_call(runtime: Runtime) -> None:
    """ "Constructor failures surface at the first method call".

    `spawn` raises them, all ranks' together, with type and traceback, and nothing is left running.
    """
    with runtime.reserve(2, cpus=0) as pool:
        with pytest.raises(RoleStartError) as caught:
            pool.spawn({"faulty": colocate.role(FailsToStart, (0, 1))})
        assert sorted(caught.value.errors) == [0, 1]
        assert all(isinstance(error.__cause__, ValueError) for error in caught.value.errors.values())
        assert pool.groups == {}


def test_port_races_when_many_jobs_start_on_one_node(on_processes: Runtime) -> None:
    """ "Port races when many jobs start on one node": #3147, #5889.

    No port is looked for and then taken: groups that set up their process groups at the same time don't meet.
    """
    pytest.importorskip("torch")
    count = 2
    with on_processes.reserve(2 * count, cpus=0) as pool, ThreadPoolExecutor(count) as threads:
        parts = [pool[2 * index : 2 * index + 2] for index in range(count)]
        groups = list(threads.map(lambda part: part.spawn({"ring": colocate.role(Collective)}), parts))
        calls: list[Any] = [group.role("ring").sum.submit(float(n)) for n, group in enumerate(groups, 1)]
        assert [call.result(PATIENCE_S) for call in calls] == [[2.0 * n] * 2 for n in range(1, count + 1)]


def test_uneven_or_heterogeneous_nodes() -> None:
    """ "Uneven or heterogeneous nodes": #725.

    "the GPU count is checked cluster-wide only": a slot lies on one node, and the error has a row for each. "IP
    addresses are sorted as strings": nodes are in the order of their numbers. (tests/ray/test_joined.py and
    tests/dask/test_joined.py have it on clusters of unlike nodes.)
    """
    ledger = Ledger([Node("10.0.0.9", 4, 1), Node("10.0.0.10", 4, 2)], lambda devices: "cpu")
    ask = Request(1, 3, 1, None, "pack", 0.0, "three of one node", {})
    with pytest.raises(PlacementError) as caught:
        ledger.reserve(ask)
    assert [row["node"] for row in caught.value.nodes] == ["10.0.0.9", "10.0.0.10"]
    for module, key in (("colocate_ray.nodes", "natural"), ("colocate_dask.offers", "host_key")):
        in_order = sorted(["10.0.0.10", "10.0.0.9"], key=vars(pytest.importorskip(module))[key])
        assert in_order == ["10.0.0.9", "10.0.0.10"]


class Player(Role):
    """Stops where a debugger would."""

    @method
    def play(self, chips: int) -> int:
        breakpoint()
        return chips + 1


def test_debugging_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Debugging without a cluster": OpenRLHF #258.

    A role object works without any executor, and on threads role code runs in the driver's process: a breakpoint in it
    is one.
    """
    stops: list[tuple[int, int]] = []

    def stopped() -> None:
        stops.append((os.getpid(), sys._getframe(1).f_locals["chips"]))

    monkeypatch.setattr(sys, "breakpointhook", stopped)
    assert Player().play(1) == [2]
    with colocate.connect() as runtime, runtime.reserve(1) as pool:
        assert pool.spawn({"player": colocate.role(Player)}).role("player", Player).play(2) == [3]
    assert stops == [(os.getpid(), 1), (os.getpid(), 2)]
