"""The law of ownership, as a state machine that opens, uses, drops, forks and closes things in any order."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import colocate
from colocate import (
    BorrowedError,
    Call,
    ClosedError,
    ColocateError,
    PlacementError,
    PlacementTimeout,
    RoleError,
    RoleStartError,
    WorkerDied,
)

from .forking import refusals
from .landlord import Group, OneCall, OnePool, OneResident, OneRuntime
from .lawful import Lawful, flat
from .tenants import Boom, Tenant

T = TypeVar("T")
WITHIN_S = 60.0
ANY = st.integers(0, 100)


class Ownership(Lawful):
    """A machine whose steps act on the real objects and on the model; both are compared after each step."""

    # -- opening

    @initialize(sizes=st.lists(st.sampled_from([1, 1, 2]), max_size=3))
    def begin(self, sizes: list[int]) -> None:
        """Start with a few groups in one runtime, which most failures need."""
        self.connect()
        for size in sizes:
            self.reserve(0, size)
        for index in range(len(self.pools())):
            self.spawn(index, None)

    @precondition(lambda self: len(self.runtimes) < 2)
    @rule()
    def connect(self) -> None:
        runtime = colocate.connect("local", cpus=self.cpus, **self.options)
        self.runtimes.append(OneRuntime(runtime, self.cpus))

    @precondition(lambda self: self.runtimes)
    @rule(which=ANY, slots=st.sampled_from([1, 2, 2, 5]))
    def reserve(self, which: int, slots: int) -> None:
        owner = pick(self.runtimes, which)
        name = f"p{next(self.numbers)}"

        def reserve() -> colocate.Pool:
            return owner.runtime.reserve(slots=slots, timeout=0.0, name=name)

        if slots > owner.cpus:
            with pytest.raises(PlacementError, match=r"never|can't"):
                reserve()
        elif slots > owner.free:
            with pytest.raises(PlacementTimeout):
                reserve()
        else:
            owner.pools.append(OnePool(owner, reserve(), name, slots))

    @precondition(lambda self: self.pools())
    @rule(which=ANY, fails_on=st.sampled_from([None, None, None, 0, 1]))
    def spawn(self, which: int, fails_on: int | None) -> None:
        pool = pick(self.pools(), which)
        name = f"g{next(self.numbers)}"

        def spawn() -> colocate.ColocatedGroup:
            return pool.pool.spawn({"tenant": colocate.role(Tenant, fails_on)}, name=name)

        if pool.group is not None:
            with pytest.raises(ColocateError, match=f"taken by group '{pool.group.name}'"):
                spawn()
        elif fails_on is not None and fails_on < pool.slots:
            with pytest.raises(RoleStartError) as caught:
                spawn()
            assert list(caught.value.errors) == [fails_on]
        else:
            pool.group = Group(pool, spawn(), name, pool.slots)

    # -- using

    @precondition(lambda self: self.groups())
    @rule(which=ANY)
    def call(self, which: int) -> None:
        group, number = pick(self.groups(), which), next(self.numbers)
        if group.calls:
            call = group.tenant.echo.submit(number)
            self.calls.append(call)
            group.calls.append(OneCall(group, call, "tenant.echo", number))
        else:
            assert group.tenant.echo(number) == number

    @precondition(lambda self: self.idle())
    @rule(which=ANY)
    def fail(self, which: int) -> None:
        group, number = pick(self.idle(), which), next(self.numbers)
        with pytest.raises(RoleError) as caught:
            group.tenant.fail(number)
        assert isinstance(caught.value.__cause__, Boom)
        assert caught.value.group == group.name

    @precondition(lambda self: self.groups())
    @rule(which=ANY, fails=st.sampled_from([False, False, True]))
    def keep(self, which: int, fails: bool) -> None:
        group = pick(self.groups(), which)
        if not fails or not group.calls:
            self._keep(group, fails)

    def _keep(self, group: Group, fails: bool) -> None:
        number = next(self.numbers)
        label = "tenant.fail" if fails else "tenant.make"
        resident = (group.tenant.fail if fails else group.tenant.make).keep(number)
        value = [item for rank in range(group.slots) for item in (number, rank)]
        kept = OneResident(group, resident, label, value, poisoned=fails, made=not group.calls)
        group.residents.append(kept)
        group.unseen += fails
        if group.calls:
            group.calls.append(OneCall(group, Call(resident._kept.call), label, None))  # type: ignore[attr-defined]
        else:
            group.tenant.echo()  # Returns after the kept call is over.

    @precondition(lambda self: self.residents())
    @rule(which=ANY)
    def fetch(self, which: int) -> None:
        kept = pick(self.residents(), which)
        assert kept.resident is not None
        if kept.poisoned:
            with pytest.raises(RoleError) as caught:
                kept.resident.fetch()
            assert isinstance(caught.value.__cause__, Boom)
            kept.group.unseen -= not kept.seen
            kept.seen = True
        elif kept.made:
            assert kept.resident.fetch() == kept.value

    @precondition(lambda self: self.residents())
    @rule(which=ANY)
    def free(self, which: int) -> None:
        kept = pick(self.residents(), which)
        assert kept.resident is not None
        kept.freed = True
        kept.resident.free()
        kept.resident.free()
        with pytest.raises(ClosedError, match=r"freed by free\(\)"):
            kept.resident.fetch()
        with pytest.raises(ClosedError, match=r"freed by free\(\)"):
            kept.group.tenant.echo.submit(kept.resident.ref)

    @precondition(lambda self: self.residents())
    @rule(which=ANY)
    def drop(self, which: int) -> None:
        pick(self.residents(), which).resident = None
        gc.collect()

    @precondition(lambda self: self.idle())
    @rule(which=ANY)
    def count(self, which: int) -> None:
        """Residents without a name or a use have left the workers by the time of the next call."""
        group = pick(self.idle(), which)
        assert group.tenant.stored() == [group.held()] * group.slots

    # -- waiting and borrowing

    @precondition(lambda self: self.idle())
    @rule(which=ANY)
    def wait(self, which: int) -> None:
        self._wait(pick(self.idle(), which), None)

    @precondition(lambda self: self.idle() and self.residents())
    @rule(which=ANY, what=ANY)
    def borrow(self, which: int, what: int) -> None:
        group, kept = pick(self.idle(), which), pick(self.residents(), what)
        assert kept.resident is not None
        if kept.poisoned or not kept.made:
            return
        if kept.group.pool.runtime is group.pool.runtime:
            self._wait(group, kept)
            return
        with pytest.raises(ColocateError, match="another runtime"):
            group.tenant.echo(kept.resident.ref)

    @precondition(lambda self: self.neighbours())
    @rule(which=ANY, again=st.booleans())
    def lend(self, which: int, again: bool) -> None:
        """Keep a value in one group, and use the value at a gate in another group."""
        owner, borrower = pick(self.neighbours(), which)
        made = [kept for kept in owner.leased() if kept.resident is not None and kept.made and not kept.poisoned]
        if not again or not made:
            self._keep(owner, False)
            made = owner.residents[-1:]
        self._wait(borrower, made[-1])

    def _wait(self, group: Group, kept: OneResident | None) -> None:
        gate = self.gates / str(next(self.numbers))
        reference = None if kept is None or kept.resident is None else kept.resident.ref
        call = group.tenant.wait.submit(str(gate), reference)
        self.calls.append(call)
        group.calls.append(OneCall(group, call, "tenant.wait", None if kept is None else kept.value, gate, kept))

    @precondition(lambda self: self.busy())
    @rule(which=ANY)
    def open(self, which: int) -> None:
        """Open the gate of a group: all its calls end, in order."""
        group = pick(self.busy(), which)
        for gate in [call.gate for call in group.calls if call.gate is not None]:
            gate.touch()
        for call in group.calls:
            assert call.call.result(WITHIN_S) == call.value
        self._settled(group)

    def _settled(self, group: Group) -> None:
        group.calls.clear()
        for kept in group.residents:
            kept.made = True

    # -- forgetting, forking, closing

    @precondition(lambda self: self.groups())
    @rule(which=ANY)
    def forget(self, which: int) -> None:
        """Dropping every variable leaves pools and groups alive: their owner keeps them."""
        group = pick(self.groups(), which)
        alive = weakref.ref(group.group._node), weakref.ref(group.pool.pool._node)
        del group.group, group.pool.pool
        gc.collect()
        assert all(reference() is not None for reference in alive)
        group.group = group.pool.runtime.runtime.groups[group.name]
        group.pool.pool = group.group.owner

    @precondition(lambda self: self.runtimes)
    @rule()
    def fork(self) -> None:
        """A forked child can use nothing and closes nothing."""
        assert refusals(self.runtimes) == []

    @precondition(lambda self: self.groups())
    @rule(which=ANY, force=st.booleans(), leave=st.booleans())
    def close_group(self, which: int, force: bool, leave: bool) -> None:
        lent = [group for group in self.groups() if group.borrowers()]
        group = pick([*lent, *self.groups()], which)
        if not force and not leave and group.borrowers():
            self._refused(group.group.close, group.borrowers())
            return
        broken = group.borrowers()
        with self._what_went_wrong([group]):
            if leave:
                group.group.__exit__(None, None, None)
            else:
                group.group.close(force=force)
        self._end_group(group)
        self._broken(broken, group)

    @precondition(lambda self: self.pools())
    @rule(which=ANY, force=st.booleans(), leave=st.booleans())
    def close_pool(self, which: int, force: bool, leave: bool) -> None:
        lent = [group.pool for group in self.groups() if group.borrowers()]
        pool = pick([*lent, *self.pools()], which)
        groups = [pool.group] if pool.group is not None else []
        outside = {group for own in groups for group in own.borrowers()}
        if not force and not leave and outside:
            self._refused(pool.pool.close, outside)
            return
        with self._what_went_wrong(groups):
            if leave:
                pool.pool.__exit__(None, None, None)
            else:
                pool.pool.close(force=force)
        self._end_pool(pool)
        for own in groups:
            self._broken(outside, own)

    @precondition(lambda self: self.runtimes)
    @rule(which=ANY, leave=st.booleans())
    def close_runtime(self, which: int, leave: bool) -> None:
        runtime = pick(self.runtimes, which)
        with self._what_went_wrong(list(runtime.groups())):
            if leave:
                runtime.runtime.__exit__(None, None, None)
            else:
                runtime.runtime.close()
        self._end_runtime(runtime)

    def _refused(self, close: Callable[[], None], borrowers: set[Group]) -> None:
        with pytest.raises(BorrowedError) as caught:
            close()
        assert len(caught.value.borrowers) == len(borrowers)
        for group in borrowers:
            assert f"group '{group.name}'" in str(caught.value)

    @contextlib.contextmanager
    def _what_went_wrong(self, groups: list[Group]) -> Iterator[None]:
        """Check that a close raises all failures that nobody has seen, in one exception group."""
        unseen = sum(group.unseen for group in groups)
        try:
            yield
        except BaseExceptionGroup as errors:
            found = list(leaves(errors))
            assert len(found) == unseen, f"{unseen} failures were never seen, closing raised {found}"
            assert all(isinstance(error.__cause__, Boom) for error in found)
        else:
            assert unseen == 0, f"{unseen} failures were never seen, and closing didn't tell"

    def _end_group(self, group: Group) -> None:
        group.closed, group.pool.group = True, None
        self.ended.append(group)
        for call in group.calls:
            assert call.call.done(), f"{call.label} of group {group.name} is still pending"
            error = call.call.exception(0)
            # A running call may still succeed: a call at a gate returns when it sees its cancellation.
            assert isinstance(error, ClosedError) or (error is None and call.gate is not None), (
                f"{call.label}: {error!r}"
            )
        group.calls.clear()

    def _end_pool(self, pool: OnePool) -> None:
        if pool.group is not None:
            self._end_group(pool.group)
        pool.closed = True
        pool.runtime.pools.remove(pool)
        self.ended.append(pool)

    def _end_runtime(self, runtime: OneRuntime) -> None:
        for pool in list(runtime.pools):
            self._end_pool(pool)
        runtime.closed = True
        self.runtimes.remove(runtime)
        self.ended.append(runtime)

    def _broken(self, borrowers: set[Group], closed: Group) -> None:
        """Check that borrowers from a group closed by force get an error and stay usable."""
        for group in borrowers:
            for call in [call for call in group.calls if call.uses is not None and call.uses.group is closed]:
                with pytest.raises(ClosedError, match=f"group '{closed.name}' was closed"):
                    call.call.result(WITHIN_S)
                group.calls.remove(call)
            for call in group.calls:
                assert call.call.result(WITHIN_S) == call.value
            self._settled(group)


def pick(items: list[T], which: int) -> T:
    return items[which % len(items)]


def leaves(errors: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


class OwnershipOfProcesses(Ownership):
    """The same machine, which also kills workers."""

    options = {"processes": True}

    @precondition(lambda self: self.groups())
    @rule(which=ANY, slot=ANY)
    def kill(self, which: int, slot: int) -> None:
        group = pick(self.groups(), which)
        data = json.loads(group.pool.runtime.runtime.graph.render("json"))
        node = next(node for node in flat(data) if (node["kind"], node["name"]) == ("group", group.name))
        workers = [child for child in node["children"] if child["kind"] == "worker"]
        os.kill(pick(workers, slot)["pid"], signal.SIGKILL)
        for call in group.calls:
            with pytest.raises(WorkerDied):
                call.call.result(WITHIN_S)
        group.calls.clear()
        with pytest.raises(WorkerDied) as caught:
            group.tenant.echo.submit().result(WITHIN_S)
        assert caught.value.signal == "SIGKILL"
        group.dead = True


@pytest.mark.parametrize("machine", [Ownership, OwnershipOfProcesses])
def test_ownership(machine: type[Ownership], examples: dict[str, int]) -> None:
    """The law of ownership holds after each step of any sequence of opens, uses, drops, forks and closes."""
    threads = machine is Ownership
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples["threads" if threads else "processes"] // (2 if threads else 3),
            stateful_step_count=30 if threads else 15,
        ),
    )
