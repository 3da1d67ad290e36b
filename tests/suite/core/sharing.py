"""Groups that share slots: threads, memory budgets and refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Pool, Runtime
from colocate.errors import (
    CapabilityError,
    ConfigError,
    MemoryBudgetError,
    RoleStartError,
    WorkerDied,
)
from colocate.executor import OwnProcess, SharedSlots
from colocate.testing.executors import sharing
from colocate.testing.executors._base import needs, needs_feature
from colocate.testing.executors.sharing import _MIB_FLOATS, _read_variable, holding_view
from colocate.testing.probes.holders import Holding
from colocate.testing.probes.plain import Echo


def _exit_process(ctx: colocate.Context) -> None:
    os._exit(1)


class Sharing(sharing.Sharing):
    """`reserve(..., groups=2)`."""

    @needs(OwnProcess)
    def test_threads_are_divided(self, runtime: Runtime) -> None:
        """Each group gets an equal part of the slot's CPUs as its number of threads."""
        self._skip_without_sharing(runtime)
        with self.connect_privately(cpus=4) as other_runtime:
            for groups, count in ((1, 4), (2, 2), (3, 1)):
                with other_runtime.reserve(1, cpus=4, groups=groups) as pool:
                    assert pool.spawn({"echo": colocate.role(Echo)}).run(_read_variable, "OMP_NUM_THREADS") == [
                        str(count)
                    ]

    # -- budgets

    @pytest.fixture
    def models(self, runtime: Runtime, reserve: Callable[..., Pool]) -> tuple[ColocatedGroup, ColocatedGroup]:
        """Spawn two groups of a bit over 1 MiB each on a slot of 4 MiB."""
        pytest.importorskip("torch")
        self._skip_without_sharing(runtime)
        pool = reserve(1, device_memory="4MiB")
        one, other = (pool.spawn({"model": colocate.role(Holding)}, name=name) for name in ("one", "other"))
        return one, other

    @needs(OwnProcess)
    def test_a_slots_budget_counts_all_groups(self, models: tuple[ColocatedGroup, ColocatedGroup]) -> None:
        """A call over a slot's budget fails with each group's memory; memory that a group frees is available again."""
        one, other = models
        resident, first = holding_view(other).make.keep(_MIB_FLOATS), holding_view(one).make.keep(_MIB_FLOATS // 2)
        for outcome in (resident, first):
            outcome.wait()
        too_much = (
            r"after model\.make, 4\.5 MiB of .* are in use, and the pool's slots may have 4 MiB .*Held by: model "
            r"2\.5 MiB \(.*\); of group 'other': model 2 MiB \(parameters 1 MiB, buffers 4 KiB, residents 1 MiB\)\. "
        )
        refused = holding_view(one).make.keep(_MIB_FLOATS)
        with pytest.raises(MemoryBudgetError, match=too_much):
            refused.wait()
        holding_view(other).make(1)  # The refused value counts for no group.
        resident.free()
        holding_view(other).make(1)  # This call carries the release to the workers.
        second = holding_view(one).make.keep(_MIB_FLOATS)
        second.wait()
        pool = other.owner
        other.close()
        with pytest.raises(RoleStartError, match=r"'model', 4\.5 MiB of .* of group 'one': model 2\.5 MiB"):
            pool.spawn({"model": colocate.role(Holding, 2)})
        holding_view(one).make.keep(_MIB_FLOATS).wait()

    @needs(OwnProcess)
    @needs_feature("functions")
    def test_the_memory_of_a_worker_that_died(self, models: tuple[ColocatedGroup, ColocatedGroup]) -> None:
        """A dead worker's memory is free for other groups at once."""
        one, other = models
        holding_view(other).make.keep(_MIB_FLOATS).wait()
        with pytest.raises(WorkerDied):
            other.run(_exit_process)
        holding_view(one).make.keep(2 * _MIB_FLOATS).wait()

    @needs(OwnProcess)
    def test_wake_counts_memory_of_other_groups(self, models: tuple[ColocatedGroup, ColocatedGroup]) -> None:
        """A wake is refused while other groups leave no room, and a sleeping role's memory counts as free."""
        one, other = models
        other.sleep("model")
        with holding_view(one).make.keep(5 * _MIB_FLOATS // 2) as resident:
            resident.wait()
            with pytest.raises(
                MemoryBudgetError,
                match=r"waking role 'model' needs 1 MiB.*the pool's slots .* of group 'one': model 3\.5",
            ):
                other.wake("model")
        holding_view(one).make(1)
        other.wake("model")

    @needs(OwnProcess)
    def test_turns_beside_another_group(self, runtime: Runtime, reserve: Callable[..., Pool]) -> None:
        """Roles that take turns make room for the memory of another group."""
        pytest.importorskip("torch")
        self._skip_without_sharing(runtime)
        pool = reserve(1, device_memory="4MiB")
        roles = {"model": colocate.role(Holding), "second": colocate.role(Holding)}
        turns = pool.spawn(roles, residency="swap")
        beside_group = pool.spawn({"model": colocate.role(Holding)})
        for _ in range(2):
            for role in roles:
                turns.role(role, Holding).make(1)
        assert [role.asleep for role in turns.memory().slots[0].roles] == [0, 0]  # Both roles have room.
        turns.sleep("second")
        holding_view(beside_group).make.keep(3 * _MIB_FLOATS // 2).wait()
        turns.role("second", Holding).make(1)
        assert [bool(role.asleep) for role in turns.memory().slots[0].roles] == [True, False]

    @needs(SharedSlots)
    def test_threads_have_no_budget_of_slots(self, runtime: Runtime) -> None:
        """A budget of shared slots is refused if workers are threads, whose memory can't be told apart."""
        if isinstance(runtime._node.services.executor, OwnProcess):
            pytest.skip("its slots are processes")
        for budget in ({"device_memory": "1GiB"}, {"host_memory": "1GiB"}):
            with pytest.raises(CapabilityError, match=r"can't keep a budget .* of slots that groups share") as e:
                runtime.reserve(1, cpus=0, groups=2, **budget)  # type: ignore[arg-type]
            assert e.value.capability == "OwnProcess"

    # -- refusals

    def test_more_groups_than_an_executor_can(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        """An executor without `SharedSlots` refuses `groups=2` before anything is reserved."""
        monkeypatch.setattr("colocate._api.runtime.SharedSlots", type("SharedSlots", (), {}))
        before = list(runtime._node.children)
        with pytest.raises(
            CapabilityError, match=r"can't let groups share slots \(groups=2\): it lacks SharedSlots"
        ) as e:
            runtime.reserve(1, cpus=0, groups=2)
        assert e.value.capability == "SharedSlots"
        assert list(runtime._node.children) == before
        with pytest.raises(ConfigError, match=r"groups: must be a whole number from 1"):
            runtime.reserve(1, cpus=0, groups=0)

    def test_environments_that_can_not_be(self, runtime: Runtime) -> None:
        """An invalid or unsupported `env` raises an error, and no group is left."""
        with runtime.reserve(1, cpus=0) as pool:
            wrong: dict[str, Any] = {r"env\.'A=B': .*no environment can have": {"A=B": "1"}, "must be a mapping": "A"}
            for words, env in wrong.items():
                with pytest.raises(ConfigError, match=words):
                    pool.spawn({"echo": colocate.role(Echo)}, env=env)
            if not isinstance(runtime._node.services.executor, OwnProcess):
                with pytest.raises(CapabilityError, match="can't set the environment of a worker"):
                    pool.spawn({"echo": colocate.role(Echo)}, env={"A": "1"})
            assert not pool.groups
