"""Ownership of pools, groups, slots and residents: names, lifetimes, borrows, and writes into values."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from tests.suite.probes.tensors import WRITES, Mourned, Writer

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate._api.slots import Slots
from colocate._values.leaving import Watch
from colocate.errors import ClosedError, ColocateError, ConfigError, RoleError
from colocate.testing.executors import ownership
from colocate.testing.executors._base import ExecutorCase, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S


class Ownership(ExecutorCase):
    """The ownership tree: names, lifetimes and slots of pools and groups."""

    def test_automatic_names_are_free_ones(self) -> None:
        """Automatic names of pools and groups skip names that a user has given."""
        roles: dict[str, RoleSpec[Any]] = {"echo": colocate.role(Echo), "rows": colocate.role(Rows)}
        with self.connect() as runtime:
            named = runtime.reserve(1, cpus=0, name="pool-1")
            pools = [runtime.reserve(1, cpus=0) for _ in range(2)]
            assert [pool.name for pool in (named, *pools)] == ["pool-1", "pool-2", "pool-3"]
            groups = [named.spawn(roles, name="group-1"), *(pool.spawn(roles) for pool in pools)]
            assert [group.name for group in groups] == ["group-1", "group-2", "group-3"]
            assert runtime.groups == {group.name: group for group in groups}
            with groups[0].role("rows", Rows).produce.keep(2) as resident:
                for group in groups:
                    assert group.role("echo", Echo).first.options(timeout=PATIENCE_S)(resident.ref) == [0, 1]

    def test_dropping_closes_nothing(self, runtime: Runtime) -> None:
        """Dropping every variable leaves pools and groups alive in their owner."""
        pool_name = runtime.reserve(1, cpus=0, name="kept-by-its-owner").name
        node = next(child for child in runtime._node.children.values() if child.name == pool_name)
        assert isinstance(node, Slots)
        pool = colocate.Pool._wrap(node)
        pool.spawn({"echo": colocate.role(Echo)}, name="still-there").role("echo", Echo).noop()
        gc.collect()
        assert "still-there" in runtime.groups
        assert pool.groups["still-there"].role("echo", Echo).noop() == [None]
        pool.close()

    def test_slots(self, runtime: Runtime) -> None:
        """A slot takes one group at a time, and disjoint parts of a pool take a group each."""
        with runtime.reserve(3, cpus=0) as pool:
            front = pool[0:2].spawn({"echo": colocate.role(Echo)}, name="front")
            with pytest.raises(ColocateError, match=r"slot 0 of pool .* is taken by group 'front'"):
                pool.spawn({"echo": colocate.role(Echo)})
            back = pool[2].spawn({"echo": colocate.role(Echo)}, name="back")
            assert [slot.state for slot in pool.slots] == ["front", "front", "back"]
            assert [slot.index for slot in pool[1:3].slots] == [1, 2]
            assert set(pool.groups) == {"front", "back"}
            assert front.role("echo", Echo).who()[1]["slot"] == 1
            assert back.role("echo", Echo).who()[0]["slot"] == 0
            front.close()
            assert [slot.state for slot in pool.slots] == ["free", "free", "back"]
            with pytest.raises(ConfigError, match="picks none"):
                pool[3:]


class Borrows(ownership.Borrows):
    """Borrowed residents: refused and forced closes, writes, and the release of values."""

    def test_leaving_a_block_is_forced(self, runtime: Runtime, pair: ColocatedGroup) -> None:
        """Leaving a group's or pool's with block breaks a borrow: the borrowing call fails with ClosedError."""
        for leave_pool in (False, True):
            with Gate() as gate:
                waiting = pair.role("faulty", Faulty).wait.submit(gate.address)
                with runtime.reserve(1, cpus=0) as pool:
                    owner = pool.spawn({"rows": colocate.role(Rows)})
                    resident = owner.role("rows", Rows).produce.keep(2)
                    use = pair.role("echo", Echo).first.submit(resident.ref)
                    if not leave_pool:
                        with owner:
                            pass
                        assert isinstance(use.exception(PATIENCE_S), ClosedError)
                error = use.exception(PATIENCE_S)
                assert isinstance(error, ClosedError)
                assert "leaving its with block" in str(error)
            waiting.result(PATIENCE_S)

    def test_writes_are_found(self) -> None:
        """With `strict=True` every write into a resident is found, and the method that wrote is named."""
        pytest.importorskip("torch")
        of_maker = r"changed in place a value that maker\.nested had returned"
        with self.connect(strict=True) as runtime, runtime.reserve(1, cpus=0) as pool:
            group = pool.spawn({"maker": colocate.role(Writer), "user": colocate.role(Writer)})
            maker, user = group.role("maker", Writer), group.role("user", Writer)
            for how in WRITES:
                with maker.nested.keep() as resident:
                    user.hold(resident.ref)  # A read raises no error.
                    with pytest.raises(RoleError, match=rf"user\.write {of_maker}"):
                        user.write(resident.ref, how)
                    with pytest.raises(RoleError, match="changed in place"):
                        user.hold(resident.ref)
                with maker.nested.keep() as resident:
                    user.hold(resident.ref)
                    with pytest.raises(RoleError, match=rf"user\.write_held {of_maker}"):
                        user.write_held(how)
                with maker.nested.keep(), pytest.raises(RoleError, match=rf"maker\.write_returned {of_maker}"):
                    maker.write_returned(how)
            assert user.untouched() == [1.0]

    def test_writes_into_plain_arguments_are_found(self) -> None:
        """With `strict=True` every write into a plain argument raises, and the driver's value stays unchanged."""
        torch = pytest.importorskip("torch")
        numpy = pytest.importorskip("numpy")
        with self.connect(strict=True) as runtime, runtime.reserve(2, cpus=0) as pool, Gate() as gate:
            user = pool.spawn({"user": colocate.role(Writer)}).role("user", Writer)
            value = {
                "x": torch.arange(3.0),
                "pair": (torch.arange(2, 4), numpy.arange(4).reshape(2, 2)),
                "deep": {"name": "as it was", "list": [1, (torch.ones(2),)]},
            }
            driver = Watch(value, contents=True)
            for how in WRITES:
                with pytest.raises(RoleError, match=r"user\.write changed its argument 'value' in place") as caught:
                    user.write(value, how)
                assert (caught.value.role, caught.value.method) == ("user", "write")
            late = user.write_later.submit(value, "operators", [gate.address] * 2)
            gate.open()
            assert "user.write_later changed its argument 'value' in place" in str(late.exception(PATIENCE_S))
            assert user.untouched() == [1.0, 1.0]
            assert not driver.was_written()

    @needs_feature("rows")
    def test_freed_value_is_dropped_after_last_call(self) -> None:
        """A freed resident's value is dropped after its last call, whatever that call was, strict or not."""
        pytest.importorskip("torch")
        roles = {"maker": colocate.role(Mourned), "user": colocate.role(Mourned)}
        for strict in (False, True):
            with self.connect(strict=strict) as runtime, runtime.reserve(1, cpus=0) as pool:
                for name in ("use", "wait", "each", "fail", "fail_later"):
                    with pool.spawn(roles) as group:
                        maker, user = group.role("maker", Mourned), group.role("user")
                        resident = maker.make.keep()
                        call = getattr(user, name).submit(*([1, 2],) * (name == "each"), resident.ref)
                        assert (call.exception(PATIENCE_S) is not None) == name.startswith("fail")
                        resident.free()
                        del resident, call
                        assert maker.left() == 0, f"after {name}, strict={strict}"

    def test_the_call_that_wrote_is_blamed(self) -> None:
        """Of two concurrent calls with one resident, only the writing call can get the error."""
        pytest.importorskip("torch")
        with self.connect() as runtime, runtime.reserve(2, cpus=0) as pool, Gate() as first, Gate() as second:
            group = pool.spawn({"maker": colocate.role(Writer).on(slots=[0]), "user": colocate.role(Writer)})
            maker, user = group.role("maker", Writer), group.role("user", Writer)
            with maker.nested.keep() as resident:
                ends = user.write_later.submit(resident.ref, None, [None, first.address])
                writes = user.write_later.submit(resident.ref, "operators", [None, second.address])
                first.wait_for()
                second.wait_for()
                first.open()
                ends.result(PATIENCE_S)
                second.open()
                error = writes.exception(PATIENCE_S)
                if error is None:  # The rank has a copy, so the resident is unchanged.
                    assert resident.fetch()["x"].tolist() == [0.0, 1.0, 2.0]
                else:
                    assert "user.write_later changed in place a value that maker.nested had returned" in str(error)
                assert maker.untouched() == [1.0]
