"""Restarts: leftovers of the last generation, and events before the next one is ready."""

from __future__ import annotations

import math
import threading
from abc import ABCMeta
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Runtime
from colocate._calls.pending import PendingCall
from colocate._signals.in_framework import act_for_user
from colocate._worker_group.worker_group import WorkerGroup
from colocate.errors import ClosedError, ClusterError, ColocateError, GroupRestarted, PlacementError
from colocate.executor import Request, Reservation, Watchable
from colocate.features.checkpoints import driver as checkpoint
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, wait_until


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with colocate.connect("local") as runtime:
        yield runtime


@pytest.fixture
def group(runtime: Runtime) -> ColocatedGroup:
    """Return a group that is restarted after a failure."""
    return runtime.reserve(2).spawn({"lasting": colocate.role(Lasting)}, on_failure="restart")


def fail(group: ColocatedGroup) -> None:
    """Fail a group, which begins its restart."""
    group._node.fail_group(ColocateError("on purpose"))


def restarted(group: ColocatedGroup) -> None:
    """Fail a group, and wait for its restart."""
    fail(group)
    group.wait_ready(PATIENCE_S)


@pytest.mark.parametrize("meanwhile", [fail, restarted])
def test_a_checkpoint_that_comes_too_late(
    meanwhile: Callable[[ColocatedGroup], None], group: ColocatedGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that fails while a checkpoint is written restarts from the one before, which keeps its place."""
    role, folder, submit = group.role("lasting", Lasting), tmp_path / "one", checkpoint._submit
    role.add()
    group.checkpoint(folder, tag="first")
    role.add()

    def late(worker_group: WorkerGroup, part: Path, **more: Any) -> PendingCall:
        call = submit(worker_group, part, **more)
        call.result(PATIENCE_S)
        with act_for_user():  # This runs as on a thread of the user's.
            meanwhile(group)
        return call

    monkeypatch.setattr(checkpoint, "_submit", late)
    with pytest.raises(ColocateError, match="on purpose"):
        group.checkpoint(folder, tag="second")
    assert group.wait_ready(PATIENCE_S) == "first"
    assert role.add() == [2, 2]
    assert '"first"' in (folder / "checkpoint.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_resident_of_the_generation_before_in_a_pipeline(group: ColocatedGroup) -> None:
    """A recorded call with a resident of an earlier generation fails, and the pipeline's later calls run."""
    role = group.role("lasting", Lasting)
    old = role.counted.keep([1, 2])
    old.fetch()
    with group.pipeline():
        call = role.counted.submit(old.ref)
        restarted(group)
        new = role.add.submit()
    assert isinstance(call.exception(PATIENCE_S), GroupRestarted)
    assert new.result(PATIENCE_S) == [1, 1]


def test_slots_that_are_lost(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost slots are reserved anew, which uses up no restart; until then nobody can spawn on the pool."""
    executor = runtime._node.services.executor
    reserve, asked, may = executor.reserve, threading.Event(), threading.Event()
    attempts: list[Request] = []

    def refused_at_first(request: Request) -> Reservation:
        attempts.append(request)
        asked.set()
        assert may.wait(PATIENCE_S)
        if len(attempts) < 4:
            raise PlacementError("there is no place")
        return reserve(request)

    with runtime.reserve(2) as pool:
        group = pool[:1].spawn({"lasting": colocate.role(Lasting)}, on_failure="restart", restarts=1)
        monkeypatch.setattr(executor, "is_lost", lambda place: not attempts)  # Slots reserved anew aren't lost.
        monkeypatch.setattr(executor, "reserve", refused_at_first)
        fail(group)
        assert asked.wait(PATIENCE_S)
        try:
            with pytest.raises(ColocateError, match="has lost slots with their node"):
                pool[1:].spawn({"rows": colocate.role(Rows)})
            may.set()
            wait_until(lambda: len(attempts) > 1, "it is looked for again")
            with pytest.raises(TimeoutError, match=r"restarting, and waits for slots .*: there is no place"):
                group.wait_ready(0)
        finally:
            may.set()
        group.wait_ready(PATIENCE_S)
        assert len(attempts) == 4
        assert group.role("lasting", Lasting).add() == [1]
        assert len(pool[1:].spawn({"rows": colocate.role(Rows)}).role("rows", Rows).seen([1])) == 1


@pytest.mark.parametrize(
    ("joined", "timeout", "logs", "comes"),
    [
        (True, PATIENCE_S, None, True),
        (True, 0, None, False),
        (True, math.inf, {}, False),
        (False, math.inf, None, False),
    ],
    ids=["joined", "not waited for", "ended", "private"],
)
def test_a_cluster_that_does_not_answer(
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    joined: bool,
    timeout: float,
    logs: dict[str, str] | None,
    comes: bool,
) -> None:
    """A cluster that doesn't answer is waited for like slots, unless it has ended or is private, and is logged."""
    executor = runtime._node.services.executor
    reserve = executor.reserve
    untried: list[ColocateError] = [ClusterError("silent", logs=logs) for _ in range(4)]
    if comes:
        untried.insert(0, PlacementError("there is no place"))

    def refused_at_first(request: Request) -> Reservation:
        if untried:
            raise untried.pop(0)
        return reserve(request)

    with runtime.reserve(1, regrow_timeout=timeout) as pool:
        group = pool.spawn({"lasting": colocate.role(Lasting)}, on_failure="restart", restarts=1)
        monkeypatch.setattr(executor, "is_lost", lambda place: len(untried) > 0)
        monkeypatch.setattr(executor, "reserve", refused_at_first)
        if joined:
            monkeypatch.setattr(executor, "__class__", ABCMeta("Joined", (type(executor), Watchable), {}))
        fail(group)
        if comes:
            group.wait_ready(PATIENCE_S)
            assert group.role("lasting", Lasting).add() == [1]
            told = [record.getMessage() for record in caplog.records if "waits for slots" in record.getMessage()]
            assert [each.rpartition(": ")[2] for each in told] == ["there is no place", "silent"]
        else:
            with pytest.raises(ColocateError, match="on purpose") as caught:
                group.wait_ready(PATIENCE_S)
            assert "silent" in caught.value.__notes__[0]
            assert len(untried) == 3


def test_slots_that_never_come(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group fails with the reason when `regrow_timeout` is over, and a close doesn't wait for missing slots."""
    executor = runtime._node.services.executor

    def refused(request: Request) -> Reservation:
        raise PlacementError("there is no place")

    with runtime.reserve(1, regrow_timeout=0.2) as pool, runtime.reserve(1, regrow_timeout=math.inf) as other:
        group, waits = (
            each.spawn({"lasting": colocate.role(Lasting)}, on_failure="restart", restarts=1) for each in (pool, other)
        )
        monkeypatch.setattr(executor, "is_lost", lambda place: True)
        monkeypatch.setattr(executor, "reserve", refused)
        fail(group)
        with pytest.raises(ColocateError) as caught:
            group.wait_ready(PATIENCE_S)
        assert "there is no place" in caught.value.__notes__[0]
        fail(waits)
        with pytest.raises(GroupRestarted):
            waits.role("lasting", Lasting).add()
        wait_until(lambda: waits._node.restarts._missing is not None, "it waits for slots")
        waits.close()
        with pytest.raises(ClosedError):
            waits.wait_ready()
        group.close()
