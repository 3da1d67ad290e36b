"""Memory budgets: who has more than it may is told."""

from __future__ import annotations

from typing import Any

import pytest

import colocate
from colocate import RoleSpec, Runtime
from colocate.errors import ConfigError, MemoryBudgetError, RoleError, RoleStartError, SleepingError
from colocate.testing.executors._base import ExecutorCase, Spawn
from colocate.testing.probes.sleepers import Dozing, Sharing

_MIB = 2**20


class Budgets(ExecutorCase):
    """What roles, groups and slots may have."""

    def test_budget_of_a_role(self, spawn: Spawn) -> None:
        """One that has come to hold more fails of that, with who has what; the group goes on."""
        pytest.importorskip("torch")
        group = spawn({"actor": colocate.role(Dozing, 1).on(device_memory="3MiB"), "other": colocate.role(Sharing)})
        actor = group.role("actor", Dozing)
        before = actor.look()
        words = r"after actor\.train, 4 MiB of .* are in use, and role 'actor' may have 3 MiB \(device_memory\)"
        with pytest.raises(MemoryBudgetError, match=words) as error:
            actor.train()
        assert "actor 4 MiB (parameters 1 MiB, gradients 1 MiB, optimizer 1 MiB" in error.value.message
        assert (error.value.role, error.value.method) == ("actor", "train")
        rank, node = error.value.rank, error.value.node
        assert rank in (0, 1)
        assert f", on rank {rank} of group {group.name!r} (node {node}) [" in error.value.message
        group.sleep("actor", ("optimizer", "grads"))
        assert actor.look() != before  # what it has computed is there

    def test_budget_of_a_group(self, spawn: Spawn) -> None:
        """All its roles and residents together; what sleeps doesn't count, and what would be too much isn't woken."""
        pytest.importorskip("torch")
        group = spawn({"one": colocate.role(Dozing, 1), "other": colocate.role(Dozing, 1)}, device_memory="7MiB")
        one, other = group.role("one", Dozing), group.role("other", Dozing)
        group.sleep("one")
        kept = other.make.keep(_MIB + 2**14)
        kept.wait()
        with pytest.raises(MemoryBudgetError, match=r"waking role 'one' needs .*the group may have 7 MiB"):
            group.wake("one")
        with pytest.raises(SleepingError, match="could not be woken"):
            one.look()
        with pytest.raises(MemoryBudgetError, match=r"after other\.make, .*residents 6\.1 MiB"):
            other.make.keep(_MIB // 2).wait()
        assert [role.role for role in group.memory().slots[0].roles] == ["one", "other"]  # and no functions
        assert len(other.make(_MIB)) == 2  # what is only on its way doesn't count
        kept.free()
        assert group.wake("one")

    def test_budget_of_a_slot(self, runtime: Runtime) -> None:
        """It is the pool's, and of each group there."""
        pytest.importorskip("torch")
        with runtime.reserve(1, cpus=0, device_memory="1MiB") as pool:
            with pytest.raises(RoleStartError, match="the pool's slots may have 1 MiB") as error:
                pool.spawn({"actor": colocate.role(Dozing, 1)})
            assert isinstance(error.value.errors[0], MemoryBudgetError)
            with pytest.raises(ConfigError, match=r"role 'actor' can't fit: it may have 2 MiB \(device_memory\)"):
                pool.spawn({"actor": colocate.role(Dozing, 1).on(device_memory="2MiB")})

    def test_memory_for_activations(self, spawn: Spawn) -> None:
        """It stays free while the role runs, and only then."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 1).on(reserve_activations="1500KiB"), "other": colocate.role(Dozing, 1)}
        group = spawn(roles, device_memory="5MiB")
        assert len(group.role("other", Dozing).look()) == 2
        with pytest.raises(MemoryBudgetError, match=r"with 1\.5 MiB to stay free for activations"):
            group.role("one", Dozing).look()

    def test_no_memory_left(self, spawn: Spawn) -> None:
        """The error of a role that has found none says who has it, and the group goes on."""
        pytest.importorskip("torch")
        group = spawn({"actor": colocate.role(Dozing, 1)})
        actor = group.role("actor", Dozing)
        with pytest.raises(RoleError, match=r"can't allocate memory|out of memory") as error:
            actor.make(2**50)
        assert "memory of this worker: actor 2 MiB (parameters 1 MiB" in str(error.value)
        assert actor.train()

    def test_who_sleeps_is_within_a_budget_again(self, spawn: Spawn, tmp_path: Any) -> None:
        """A sleep is done, whoever has too much; a role that has, is woken and may let go of it; all can be saved."""
        pytest.importorskip("torch")
        budget = {"device_memory": "3MiB"}
        roles = {name: colocate.role(Dozing, 1).on(**budget) for name in ("one", "other")}  # type: ignore[arg-type]
        group = spawn(roles)
        one, other = group.role("one", Dozing), group.role("other", Dozing)
        for role in (one, other):
            with pytest.raises(MemoryBudgetError):
                role.train()
        assert group.sleep("one")
        group.checkpoint(tmp_path / "saved")  # `Dozing.save` asserts that it is awake
        one.let_go()
        assert len(one.look()) == 2
        with pytest.raises(MemoryBudgetError, match=r"after other\.look"):
            other.look()

    def test_a_checkpoint_wakes_one_role_at_a_time(self, spawn: Spawn, tmp_path: Any) -> None:
        """All of them together have no room, which is why they sleep."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 1), "other": colocate.role(Dozing, 1)}
        group = spawn(roles, device_memory="7MiB")
        found = {}
        for name in roles:
            found[name] = group.role(name, Dozing).train()
            group.sleep(name)
        group.checkpoint(tmp_path / "saved")
        assert all(role.asleep >= 3 * _MIB for slot in group.memory().slots for role in slot.roles)
        for name in roles:
            assert group.role(name, Dozing).look() == found[name]
            group.sleep(name)

    def test_budgets_that_can_not_be(self, runtime: Runtime) -> None:
        """They are refused before anything starts."""
        role, named = colocate.role(Dozing), {"residency": "swap", "device_memory": 5000}
        wrong: list[tuple[str, RoleSpec[Any], dict[str, Any]]] = [
            ("is no size", role, {"host_memory": -1}),
            ("reserve_activations", role.on(device_memory=5000, reserve_activations=6000), {}),
            ("there is no budget", role.on(reserve_activations=6000), {}),
            ('it is "swap"', role, {"residency": "stay", "device_memory": 5000}),
            ("say it, as in", role, {"residency": "swap"}),
            ('needs residency="swap"', role, {"step": ["a"]}),
            ("names role 'b'", role, {**named, "step": ["b"]}),
            ("is no list of roles", role, {**named, "step": ["a", 3]}),
            ("is no list of roles", role, {**named, "step": []}),
            ("is a string", role, {**named, "step": "a"}),
        ]
        with runtime.reserve(1, cpus=0) as pool:
            for words, declared, options in wrong:
                with pytest.raises(ConfigError, match=words):
                    pool.spawn({"a": declared}, **options)
        with pytest.raises(ConfigError, match="is no size"):
            role.on(device_memory="much")
        with runtime.reserve(1, cpus=0, device_memory="1MiB") as pool:
            told = r"the group may have 2 MiB \(device_memory\), and the pool's slots have 1 MiB for it"
            with pytest.raises(ConfigError, match=told):
                pool.spawn({"a": role}, device_memory="2MiB")
