"""Groups that share slots: each has workers of its own there, and calls in an order of their own."""

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
    CapabilityError,
    ColocateError,
    ConfigError,
    MemoryBudgetError,
    RoleStartError,
    WorkerDied,
)
from colocate.executor import Detachable, OwnProcess, SharedSlots
from colocate.testing.executors._base import ExecutorCase, needs, needs_feature, of_executor
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


def _variable(ctx: colocate.Context, name: str) -> str | None:
    return os.environ.get(name)


def _leave(ctx: colocate.Context) -> None:
    os._exit(1)


def held(group: ColocatedGroup) -> Holding:
    """Return the role of a group that holds memory."""
    return group.role("model", Holding)


class Sharing(ExecutorCase):
    """`reserve(..., groups=2)`."""

    @pytest.fixture
    def reserve(self, no_leaks: None, runtime: Runtime) -> Iterator[Callable[..., Pool]]:
        """Reserves slots for two groups."""
        pools: list[Pool] = []

        def make(slots: int = 2, groups: int = 2, **options: Any) -> Pool:
            pools.append(runtime.reserve(slots, cpus=0, groups=groups, **options))
            return pools[-1]

        yield make
        for pool in reversed(pools):
            pool.close(grace=1, force=True)

    @needs(SharedSlots)
    @of_executor
    @needs_feature("looking")
    def test_each_group_has_workers_of_its_own(self, runtime: Runtime, reserve: Callable[..., Pool]) -> None:
        """On the same slots, in no order with the other one's; one more than was reserved for is refused by name."""
        pool = reserve()
        one, other = pool.spawn(ROLES, name="one"), pool[1].spawn(ROLES, name="other")
        assert [slot.state for slot in pool.slots] == ["one", "one, other"]
        with Gate() as gate:
            call = one.role("faulty", Faulty).wait.submit(gate.address)
            gate.wait_for(2)
            assert other.role("echo", Echo).noop() == [None]
            with pytest.raises(
                ColocateError,
                match=r"slot 1 of pool .* is taken by groups 'one' and 'other': it takes 2 groups at a time",
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
    @of_executor
    def test_values_between_groups_of_a_slot(self, reserve: Callable[..., Pool]) -> None:
        """A resident of one is an argument of the other, whose use of it refuses the close."""
        pool = reserve()
        one, other = pool.spawn(ROLES, name="one"), pool.spawn(ROLES, name="other")
        kept = one.role("rows", Rows).produce.keep(4)
        assert other.role("rows", Rows).double(kept.ref) == [2 * row for row in kept.fetch()]
        with Gate() as gate:
            call = other.role("faulty", Faulty).wait.submit(gate.address)
            use = other.role("rows", Rows).double.submit(kept.ref)
            with pytest.raises(BorrowedError, match=r"rows\.double of group 'other' uses the resident of rows"):
                one.close()
        call.result(PATIENCE_S)
        assert use.result(PATIENCE_S) == [2 * row for row in kept.fetch()]

    @needs(OwnProcess)
    @of_executor
    @needs_feature("looking")
    def test_a_crash_stays_one_groups(self, runtime: Runtime, reserve: Callable[..., Pool]) -> None:
        """What is killed fails its own group, or is restarted, beside one that goes on with what it has."""
        self._share(runtime)
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
    @of_executor
    @needs_feature("functions")
    def test_an_environment_of_its_own(self, reserve: Callable[..., Pool]) -> None:
        """On top of the pool's, before a role is imported; also what is read at a process's start."""
        pool = reserve(1, env={"COLOCATE_PROBE": "the pool's", "COLOCATE_OTHER": "the pool's"})
        plain = pool.spawn({"early": colocate.role(Early)})
        own = pool.spawn({"early": colocate.role(Early)}, env={"COLOCATE_PROBE": "its own", "PYTHONHASHSEED": "7"})
        assert [each.role("early", Early).at_import() for each in (plain, own)] == [["the pool's"], ["its own"]]
        assert own.run(_variable, "COLOCATE_OTHER") == ["the pool's"]
        assert plain.run(_variable, "PYTHONHASHSEED") != own.run(_variable, "PYTHONHASHSEED") == ["7"]

    @needs(OwnProcess)
    @of_executor
    @needs_feature("looking")
    def test_all_groups_of_a_lost_slot_get_others(self, runtime: Runtime) -> None:
        """Slots are reserved once for all, and each group is restarted there."""
        self._share(runtime)
        with self.connect() as own, own.reserve(2, cpus=0, groups=2) as pool:
            groups = [pool.spawn(ROLES, on_failure="restart", restarts=1) for _ in range(2)]
            before = self.places_of(groups[0])
            self.vanish(before[1])
            wait_until(lambda: own._node.services.executor.lost(before[1]), "the slot is lost")
            wait_until(lambda: all(group.generation for group in groups), "both are restarted")
            for group in groups:
                group.wait_ready(PATIENCE_S)
                assert group.role("echo", Echo).noop() == [None, None]
            assert not any(place is before[1] for place in pool._node.places)
            assert not own.audit()

    @needs(OwnProcess)
    def test_threads_are_divided(self, runtime: Runtime) -> None:
        """Of the CPUs of a slot each group has its part."""
        self._share(runtime)
        with self.connect_privately(cpus=4) as own:
            for groups, count in ((1, 4), (2, 2), (3, 1)):
                with own.reserve(1, cpus=4, groups=groups) as pool:
                    assert pool.spawn({"echo": colocate.role(Echo)}).run(_variable, "OMP_NUM_THREADS") == [str(count)]

    # -- budgets

    @pytest.fixture
    def models(self, runtime: Runtime, reserve: Callable[..., Pool]) -> tuple[ColocatedGroup, ColocatedGroup]:
        """Two groups with a MiB each, and a little, on a slot that has four."""
        pytest.importorskip("torch")
        self._share(runtime)
        pool = reserve(1, device_memory="4MiB")
        one, other = (pool.spawn({"model": colocate.role(Holding)}, name=name) for name in ("one", "other"))
        return one, other

    @needs(OwnProcess)
    def test_a_slots_budget_counts_all_groups(self, models: tuple[ColocatedGroup, ColocatedGroup]) -> None:
        """Who comes to have too much is told what the others have; what they let go of, or took along, is free."""
        one, other = models
        kept, first = held(other).make.keep(_MIB_FLOATS), held(one).make.keep(_MIB_FLOATS // 2)
        for each in (kept, first):
            each.wait()
        too_much = (
            r"after model\.make, 4\.5 MiB of .* are in use, and the pool's slots may have 4 MiB .*Who has it: model "
            r"2\.5 MiB \(.*\); of group 'other': model 2 MiB \(parameters 1 MiB, buffers 4 KiB, residents 1 MiB\)\. "
        )
        refused = held(one).make.keep(_MIB_FLOATS)
        with pytest.raises(MemoryBudgetError, match=too_much):
            refused.wait()
        held(other).make(1)  # to others, too, what was refused isn't there
        kept.free()
        held(other).make(1)  # with which the workers are told
        second = held(one).make.keep(_MIB_FLOATS)
        second.wait()
        pool = other.owner
        other.close()
        with pytest.raises(RoleStartError, match=r"'model', 4\.5 MiB of .* of group 'one': model 2\.5 MiB"):
            pool.spawn({"model": colocate.role(Holding, 2)})
        held(one).make.keep(_MIB_FLOATS).wait()

    @needs(OwnProcess)
    @needs_feature("functions")
    def test_the_memory_of_a_worker_that_died(self, models: tuple[ColocatedGroup, ColocatedGroup]) -> None:
        """Memory of the dead is free for the others at once."""
        one, other = models
        held(other).make.keep(_MIB_FLOATS).wait()
        with pytest.raises(WorkerDied):
            other.run(_leave)
        held(one).make.keep(2 * _MIB_FLOATS).wait()

    @needs(OwnProcess)
    def test_a_wake_looks_at_what_other_groups_hold(self, models: tuple[ColocatedGroup, ColocatedGroup]) -> None:
        """A wake is refused as long as there is no room beside that, and what sleeps makes room."""
        one, other = models
        other.sleep("model")
        with held(one).make.keep(5 * _MIB_FLOATS // 2) as kept:
            kept.wait()
            with pytest.raises(
                MemoryBudgetError,
                match=r"waking role 'model' needs 1 MiB.*the pool's slots .* of group 'one': model 3\.5",
            ):
                other.wake("model")
        held(one).make(1)
        other.wake("model")

    @needs(OwnProcess)
    def test_turns_beside_another_group(self, runtime: Runtime, reserve: Callable[..., Pool]) -> None:
        """Who takes turns makes room for what another group has come to hold."""
        pytest.importorskip("torch")
        self._share(runtime)
        pool = reserve(1, device_memory="4MiB")
        roles = {"model": colocate.role(Holding), "second": colocate.role(Holding)}
        turns = pool.spawn(roles, residency="swap")
        beside = pool.spawn({"model": colocate.role(Holding)})
        for _ in range(2):
            for role in roles:
                turns.role(role, Holding).make(1)
        assert [role.asleep for role in turns.memory().slots[0].roles] == [0, 0]  # there is room for both
        turns.sleep("second")
        held(beside).make.keep(3 * _MIB_FLOATS // 2).wait()
        turns.role("second", Holding).make(1)
        assert [bool(role.asleep) for role in turns.memory().slots[0].roles] == [True, False]

    @needs(SharedSlots)
    def test_threads_have_no_budget_of_slots(self, runtime: Runtime) -> None:
        """Memory of threads is one process's: a budget that counts groups apart needs processes."""
        if isinstance(runtime._node.services.executor, OwnProcess):
            pytest.skip("its slots are processes")
        for budget in ({"device_memory": "1GiB"}, {"host_memory": "1GiB"}):
            with pytest.raises(CapabilityError, match=r"can't keep a budget .* of slots that groups share") as e:
                runtime.reserve(1, cpus=0, groups=2, **budget)  # type: ignore[arg-type]
            assert e.value.capability == "OwnProcess"

    # -- refusals

    def test_more_groups_than_an_executor_can(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        """An executor that lacks `SharedSlots` is told apart before anything is reserved."""
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
        """Such environments are refused before anything starts."""
        with runtime.reserve(1, cpus=0) as pool:
            wrong: dict[str, Any] = {r"env\.'A=B': .*no environment can have": {"A=B": "1"}, "must be a mapping": "A"}
            for words, env in wrong.items():
                with pytest.raises(ConfigError, match=words):
                    pool.spawn({"echo": colocate.role(Echo)}, env=env)
            if not isinstance(runtime._node.services.executor, OwnProcess):
                with pytest.raises(CapabilityError, match="can't set the environment of a worker"):
                    pool.spawn({"echo": colocate.role(Echo)}, env={"A": "1"})
            assert not pool.groups

    def _share(self, runtime: Runtime) -> None:
        if not isinstance(runtime._node.services.executor, SharedSlots):
            pytest.skip(f"executor {runtime.name!r} lacks SharedSlots")


class SharingDetached(DetachedCase):
    """A pool is detached with all its groups."""

    @needs(Detachable)
    @of_executor
    def test_groups_that_share_slots_go_on(self, runtime: Runtime, name: str) -> None:
        """The next driver has them all, at one epoch, and what they hold still counts; not what one held that died."""
        pytest.importorskip("torch")
        if not isinstance(runtime._node.services.executor, SharedSlots):
            pytest.skip(f"executor {runtime.name!r} lacks SharedSlots")
        pool = runtime.reserve(1, cpus=0, groups=2, detachable=True, device_memory="4MiB")
        for each, mib in (("one", 1), ("other", 2)):
            pool.spawn({"model": colocate.role(Holding, mib), "lasting": colocate.role(Lasting)}, name=each)
        ((_, _, pid),) = pool.groups["other"].role("lasting", Lasting).tell()
        workers = Processes([pid])
        pool.detach(name, ttl=TTL_S)
        with runtime.attach(name) as mine:
            assert set(mine.groups) == {"one", "other"}
            assert [slot.state for slot in mine.slots] == ["one, other"]
            with pytest.raises(MemoryBudgetError, match=r"of group 'other': model 2 MiB"):
                held(mine.groups["one"]).make.keep(_MIB_FLOATS).wait()
            with pytest.raises(ColocateError, match="taken by groups 'one' and 'other'"):
                mine.spawn({"echo": colocate.role(Echo)})
        os.kill(pid, signal.SIGKILL)
        workers.wait()
        workers.close()
        with runtime.attach(name, own=True) as mine:
            with pytest.raises(WorkerDied):
                mine.groups["other"].role("lasting", Lasting).add()
            held(mine.groups["one"]).make.keep(2 * _MIB_FLOATS).wait()
