"""Roles that take turns within a budget that is too small for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.suite.probes.sleepers import Dozing, Watching

import colocate
from colocate import ColocatedGroup, Context, RoleSpec, Runtime
from colocate.errors import (
    MemoryBudgetError,
    RoleStartError,
)
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.waiting import wait_until

_MIB = 2**20


@needs(OwnProcess)
class TakingTurns(ExecutorCase):
    """Roles that sleep for each other where a budget has no room for all."""

    @pytest.fixture
    def turns(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn three models that need 4, 8 and 4 MiB once trained, within a budget of 10 MiB."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 1), "two": colocate.role(Dozing, 2), "three": colocate.role(Dozing, 1)}
        return spawn(roles, residency="swap", device_memory="10MiB")

    def test_roles_take_turns(self, turns: ColocatedGroup, spawn: Spawn) -> None:
        """Roles that take turns compute the same results as without turns, and stay within the budget."""
        free = spawn(
            {"one": colocate.role(Dozing, 1), "two": colocate.role(Dozing, 2), "three": colocate.role(Dozing, 1)}
        )
        for name in ["one", "two", "three", "two"] * 5:
            assert turns.role(name, Dozing).train() == free.role(name, Dozing).train()
            for slot in turns.memory().slots:
                assert sum(role.total for role in slot.roles) <= 10 * _MIB
        asleep = [role.asleep for slot in turns.memory().slots for role in slot.roles]
        assert sum(asleep) >= 2 * 6 * _MIB
        for name in ("one", "two", "three"):
            assert turns.role(name, Dozing).digest() == free.role(name, Dozing).digest()

    def test_observers_are_notified_of_turns(self, turns: ColocatedGroup, runtime: Runtime) -> None:
        """Observers are notified of sleeps and wakes on all ranks, with bytes, times and reasons."""
        records: list[colocate.MoveRecord] = []

        class Mover:
            def colocate_memory_moved(self, record: colocate.MoveRecord) -> None:
                records.append(record)

        runtime.observe(Mover())
        for name in ("one", "two", "three", "one", "two", "three"):
            turns.role(name, Dozing).train()
        kinds = {(kind, rank) for kind in ("sleep", "wake") for rank in (0, 1)}
        wait_until(lambda: {(record.kind, record.rank) for record in records} == kinds, "both ranks have told of both")
        assert all(record.nbytes > 0 and record.end >= record.start for record in records)
        assert {record.group for record in records} == {turns.name}
        reasons = {(record.kind, record.role, record.why) for record in records}
        assert {entry for entry in reasons if entry[0] == "wake"} <= {
            ("wake", name, f"needed by {name}.train") for name in ("one", "two", "three")
        }
        assert {why for kind, _, why in reasons if kind == "sleep"} <= {
            f"room for role '{name}'" for name in ("one", "two", "three")
        }

    def test_farthest_or_least_recent_role_makes_room(self, spawn: Spawn) -> None:
        """The role whose next turn is farthest makes room if `step` gives the order, else the least recently called."""
        pytest.importorskip("torch")
        roles: dict[str, RoleSpec[Any]] = {name: colocate.role(Dozing, 1) for name in ("one", "two", "three")}
        for step, sleeper, stays in (([*roles], "one", "three"), (None, "three", "one")):
            group = spawn(roles, slots=1, residency="swap", device_memory="9MiB", step=step)  # there is room for two
            for name in (*roles, "one", "two"):
                group.role(name, Dozing).train()
            assert group.role(sleeper, Dozing).list_asleep() == [["weights", "grads", "optimizer", "cache"]]
            assert group.role(stays, Dozing).list_asleep() == [[]]

    def test_other_roles_sleep_before_first_use(self, spawn: Spawn) -> None:
        """All other roles sleep before a role's constructor and before the first run of a method."""
        pytest.importorskip("torch")
        roles: dict[str, RoleSpec[Any]] = {"one": colocate.role(Dozing, 2), "two": colocate.role(Watching, "one", 2)}
        group = spawn(roles, slots=1, residency="swap", device_memory="40MiB")
        one, two = group.role("one", Dozing), group.role("two", Watching)
        all_of_it = ["weights", "grads", "optimizer", "cache"]
        for _ in range(2):
            one.train()
            two.train()
        assert two.has_seen() == [[all_of_it, all_of_it, []]]

    @pytest.mark.long
    @needs_feature("functions")
    def test_more_than_there_is_memory_for(self, spawn: Spawn) -> None:
        """Of three roles only one is in memory at any time, from the constructors on."""
        pytest.importorskip("torch")
        names = "one", "two", "three"
        mib = 36  # `malloc` may keep freed pieces of up to 32 MiB; larger ones return to the system.
        most = []
        for these in (names[:1], names):
            roles = {name: colocate.role(Dozing, mib) for name in these}  # Each has twice `mib`: weights and a cache.
            group = spawn(roles, slots=1, residency="swap", device_memory=f"{2 * mib + 16}MiB")
            group.sleep("one")  # Without tags, all memory sleeps.
            digests = [group.role(name, Dozing).digest() for name in these * 2]
            assert digests[: len(these)] == digests[len(these) :]
            most += group.run(peak_memory)
            group.close()
        assert most[1] - most[0] < mib * _MIB

    def test_method_wakes_only_needed_memory(self, spawn: Spawn) -> None:
        """A method that needs only the weights leaves the rest of its role asleep."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 2), "two": colocate.role(Dozing, 2)}
        group = spawn(roles, slots=1, residency="swap", device_memory="12MiB")
        one, two = group.role("one", Dozing), group.role("two", Dozing)
        assert one.look() == two.look()  # On a first run all other roles make room.
        one.train()
        two.train()
        assert one.list_asleep() == [["weights", "grads", "optimizer", "cache"]]
        one.look()
        assert one.list_asleep() == [["grads", "optimizer", "cache"]]
        assert two.list_asleep() == [[]]

    def test_a_role_that_residents_keep_awake(self, spawn: Spawn) -> None:
        """The error of a role that lacks room names the residents that keep another role awake."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 2), "two": colocate.role(Dozing, 2)}
        group = spawn(roles, slots=1, residency="swap", device_memory="5MiB")
        resident = group.role("one", Dozing).weights.keep()
        resident.wait()
        why = r"waking role 'two' needs .* one 2 MiB \(.*\), asleep but for 2 MiB used by residents"
        with pytest.raises(MemoryBudgetError, match=why):
            group.role("two", Dozing).digest()
        resident.free()
        assert group.role("two", Dozing).digest()

    def test_a_role_that_can_not_be_put_to_sleep(self, spawn: Spawn) -> None:
        """The budget error names the role whose sleep hook failed; the waiting role runs once the hook works."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 2, hooks=True), "two": colocate.role(Dozing, 2)}
        group = spawn(roles, slots=1, residency="swap", device_memory="9MiB")
        one, two = group.role("one", Dozing), group.role("two", Dozing)
        assert one.look()
        one.fail_hook(0, RuntimeError("not now"))
        why = "'one' could not make room for role 'two': RuntimeError: not now"
        with pytest.raises(MemoryBudgetError, match=why) as raised:
            two.train()
        assert "in _sleep" in (raised.value.remote_traceback or "")
        one.fail_hook(0, None)
        assert two.train()

    def test_a_role_that_can_not_take_turns(self, spawn: Spawn) -> None:
        """A role that is alone too large for the budget fails its start, or later the call in which it grew."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 1), "two": colocate.role(Dozing, 4)}
        with pytest.raises(RoleStartError, match="after the constructor of role 'two', 8 MiB"):
            spawn(roles, residency="swap", device_memory="7MiB")
        roles = {"one": colocate.role(Dozing, 1), "two": colocate.role(Dozing, 2)}
        group = spawn(roles, residency="swap", device_memory="7MiB")
        with pytest.raises(MemoryBudgetError, match=r"after two\.train, 8 MiB"):
            group.role("two", Dozing).train()
        assert group.role("one", Dozing).train()


def peak_memory(ctx: Context) -> int:
    """Return the process's peak memory in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
