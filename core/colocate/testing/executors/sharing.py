"""Tests of groups that share slots, each with its own workers and its own order of calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Pool, RoleSpec, Runtime
from colocate.errors import (
    BorrowedError,
    ColocateError,
    MemoryBudgetError,
    WorkerDied,
)
from colocate.executor import Detachable, OwnProcess, SharedSlots
from colocate.testing.executors._base import ExecutorCase, needs, needs_feature
from colocate.testing.executors.detaching import TTL_S, DetachedCase
from colocate.testing.gate import Gate
from colocate.testing.probes.early import Early
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.holders import Holding
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, Processes, wait_until

ROLES: dict[str, RoleSpec[Any]] = {
    "echo": colocate.role(Echo),
    "rows": colocate.role(Rows),
    "faulty": colocate.role(Faulty),
    "lasting": colocate.role(Lasting),
}
_MIB_FLOATS = 2**18


def _read_variable(ctx: colocate.Context, name: str) -> str | None:
    return os.environ.get(name)


def holding_view(group: ColocatedGroup) -> Holding:
    """Return the view of a group's role that holds memory."""
    return group.role("model", Holding)


class Sharing(ExecutorCase):
    """Tests of `reserve(..., groups=2)`."""

    @pytest.fixture
    def reserve(self, no_leaks: None, runtime: Runtime) -> Iterator[Callable[..., Pool]]:
        """A function that reserves slots for two groups."""
        pools: list[Pool] = []

        def make(slots: int = 2, groups: int = 2, **options: Any) -> Pool:
            pools.append(runtime.reserve(slots, cpus=0, groups=groups, **options))
            return pools[-1]

        yield make
        for pool in reversed(pools):
            pool.close(grace=1, force=True)

    @needs(SharedSlots)
    @needs_feature("looking")
    def test_groups_have_separate_workers(self, runtime: Runtime, reserve: Callable[..., Pool]) -> None:
        """Two groups on the same slots run calls independently, and a third group is refused."""
        pool = reserve()
        one, other = pool.spawn(ROLES, name="one"), pool[1].spawn(ROLES, name="other")
        assert [slot.state for slot in pool.slots] == ["one", "one, other"]
        with Gate() as gate:
            call = one.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for(2)
            assert other.role("echo", Echo).noop() == [None]
            with pytest.raises(
                ColocateError,
                match=r"slot 1 of pool .* is taken by groups 'one' and 'other': a slot has room for 2 groups at a time",
            ):
                pool[1:].spawn(ROLES, name="third")
            assert not runtime.audit()
        call.result(PATIENCE_S)
        pids = [pid for group in (one, other) for pid, *_ in group.role("echo", Echo).place()]
        assert len(set(pids)) == (3 if isinstance(runtime._node.services.executor, OwnProcess) else 1)
        one.close()
        assert [slot.state for slot in pool.slots] == ["free", "other"]
        third = pool.spawn(ROLES, name="third")
        assert third.role("echo", Echo).noop() == [None, None]
        assert other.role("echo", Echo).noop() == [None]
        assert set(pool.groups) == {"third", "other"}

    @needs(SharedSlots)
    def test_values_between_groups_of_a_slot(self, reserve: Callable[..., Pool]) -> None:
        """A group can use a resident of another group. During that use, the other group can't be closed."""
        pool = reserve()
        one, other = pool.spawn(ROLES, name="one"), pool.spawn(ROLES, name="other")
        resident = one.role("rows", Rows).produce.keep(4)
        assert other.role("rows", Rows).double(resident.ref) == [2 * row for row in resident.fetch()]
        with Gate() as gate:
            call = other.role("faulty", Faulty).wait.submit(gate.address)
            use = other.role("rows", Rows).double.submit(resident.ref)
            with pytest.raises(BorrowedError, match=r"rows\.double of group 'other' uses the resident of rows"):
                one.close()
        call.result(PATIENCE_S)
        assert use.result(PATIENCE_S) == [2 * row for row in resident.fetch()]

    @needs(OwnProcess)
    @needs_feature("looking")
    def test_a_crash_stays_one_groups(self, runtime: Runtime, reserve: Callable[..., Pool]) -> None:
        """A killed worker fails or restarts only its own group, and the other group continues."""
        self._skip_without_sharing(runtime)
        pool = reserve()
        frail, lasting = pool.spawn(ROLES, name="frail"), pool.spawn(ROLES, name="lasting", on_failure="restart")
        one, other = frail.role("lasting", Lasting), lasting.role("lasting", Lasting)
        one.add()
        with pytest.raises(colocate.errors.GroupRestarted):
            other.kill()
        lasting.wait_ready(PATIENCE_S)
        assert [generation for _, generation, _ in other.tell()] == [1, 1]
        with Gate() as gate:
            call = other.wait.submit(gate.address)
            gate.wait_for(2)
            with pytest.raises(WorkerDied):
                one.kill()
        assert call.result(PATIENCE_S) == [0, 0]
        assert other.add() == [1, 1]
        frail.close()
        assert pool.spawn(ROLES, name="new").role("lasting", Lasting).add() == [1, 1]
        assert not runtime.audit()

    @needs(OwnProcess)
    @needs_feature("functions")
    def test_group_environment_extends_pool_environment(self, reserve: Callable[..., Pool]) -> None:
        """A group's own `env=` is added to the pool's environment before any role is imported."""
        pool = reserve(1, env={"COLOCATE_PROBE": "the pool's", "COLOCATE_OTHER": "the pool's"})
        plain = pool.spawn({"early": colocate.role(Early)})
        separate = pool.spawn({"early": colocate.role(Early)}, env={"COLOCATE_PROBE": "its own", "PYTHONHASHSEED": "7"})
        assert [group.role("early", Early).at_import() for group in (plain, separate)] == [["the pool's"], ["its own"]]
        assert separate.run(_read_variable, "COLOCATE_OTHER") == ["the pool's"]
        assert plain.run(_read_variable, "PYTHONHASHSEED") != separate.run(_read_variable, "PYTHONHASHSEED") == ["7"]

    @needs(OwnProcess)
    @needs_feature("looking")
    def test_all_groups_of_a_lost_slot_get_others(self, runtime: Runtime) -> None:
        """After a shared slot is lost, new slots are reserved once, and all groups restart there."""
        self._skip_without_sharing(runtime)
        with self.connect() as other_runtime, other_runtime.reserve(2, cpus=0, groups=2) as pool:
            groups = [pool.spawn(ROLES, on_failure="restart", restarts=1) for _ in range(2)]
            before = self.places_of(groups[0])
            self.vanish(before[1])
            wait_until(lambda: other_runtime._node.services.executor.is_lost(before[1]), "the slot is lost")
            wait_until(lambda: all(group.generation for group in groups), "both are restarted")
            for group in groups:
                group.wait_ready(PATIENCE_S)
                assert group.role("echo", Echo).noop() == [None, None]
            assert not any(place is before[1] for place in pool._node.places)
            assert not other_runtime.audit()

    def _skip_without_sharing(self, runtime: Runtime) -> None:
        if not isinstance(runtime._node.services.executor, SharedSlots):
            pytest.skip(f"executor {runtime.name!r} lacks SharedSlots")


class SharingDetached(DetachedCase):
    """Tests of detaching a pool with several groups."""

    @needs(Detachable)
    def test_groups_that_share_slots_go_on(self, runtime: Runtime, name: str) -> None:
        """The next driver gets all groups of a pool, and the budget counts a group's memory until its worker dies."""
        pytest.importorskip("torch")
        if not isinstance(runtime._node.services.executor, SharedSlots):
            pytest.skip(f"executor {runtime.name!r} lacks SharedSlots")
        pool = runtime.reserve(1, cpus=0, groups=2, detachable=True, device_memory="4MiB")
        for group_name, mib in (("one", 1), ("other", 2)):
            pool.spawn({"model": colocate.role(Holding, mib), "lasting": colocate.role(Lasting)}, name=group_name)
        ((_, _, pid),) = pool.groups["other"].role("lasting", Lasting).tell()
        workers = Processes([pid])
        pool.detach(name, ttl=TTL_S)
        with runtime.attach(name) as mine:
            assert set(mine.groups) == {"one", "other"}
            assert [slot.state for slot in mine.slots] == ["one, other"]
            with pytest.raises(MemoryBudgetError, match=r"of group 'other': model 2 MiB"):
                holding_view(mine.groups["one"]).make.keep(_MIB_FLOATS).wait()
            with pytest.raises(ColocateError, match="taken by groups 'one' and 'other'"):
                mine.spawn({"echo": colocate.role(Echo)})
        os.kill(pid, signal.SIGKILL)
        workers.wait_all()
        workers.release_all()
        with runtime.attach(name, own=True) as mine:
            with pytest.raises(WorkerDied):
                mine.groups["other"].role("lasting", Lasting).add()
            holding_view(mine.groups["one"]).make.keep(2 * _MIB_FLOATS).wait()
