"""Roles that manage memory and processes of their own, as engines do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.suite.probes.engines import BYTES, Borrower, EngineUser, LoneEngine
from tests.suite.probes.sleepers import Dozing

import colocate
from colocate.errors import CapabilityError, ConfigError, RoleError, SleepingError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature


class Engines(ExecutorCase):
    """Roles that have an engine."""

    @needs(OwnProcess)
    def test_managed_memory(self, spawn: Spawn) -> None:
        """`managed` memory counts in a role's memory, sleep and wake; tensors of `apart` objects stay in place."""
        pytest.importorskip("torch")
        group = spawn({"engine": colocate.role(EngineUser)}, slots=1)
        engine = group.role("engine", EngineUser)
        (role,) = group.memory().slots[0].roles
        assert role.device == {"tensors": 2 * BYTES}
        assert group.sleep("engine") == 2 * BYTES
        assert engine.state() == [(False, BYTES)]
        (role,) = group.memory().slots[0].roles
        assert (role.total, role.asleep) == (0, BYTES)
        assert group.wake("engine") == 2 * BYTES
        assert engine.state() == [(True, BYTES)]
        group.sleep("engine")
        assert engine.use() == [True]

    @needs_feature("memory")
    def test_managed_memory_and_budgets(self, spawn: Spawn) -> None:
        """A memory budget counts managed memory, and a wrong return value of `managed` raises an error."""
        pytest.importorskip("torch")
        with pytest.raises(colocate.RoleStartError, match=r"tensors 2 MiB"):
            spawn({"engine": colocate.role(EngineUser).on(device_memory="1500KiB")}, slots=1)
        group = spawn({"engine": colocate.role(EngineUser, wrong=True)}, slots=1)
        with pytest.raises(RoleError, match=r"managed\(\) of role 'engine' returns \{'cash': 1\}.*bytes by tag"):
            group.memory()

    @needs(OwnProcess)
    def test_close_of_roles(self, spawn: Spawn, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """A role's `close` can use its process groups, and an exception from `close` is printed."""
        pytest.importorskip("torch")
        roles = {
            "engine": colocate.role(EngineUser, str(tmp_path / "closed")),
            "wrong": colocate.role(EngineUser, None, wrong=True),
        }
        group = spawn(roles)
        assert group.role("engine", EngineUser).ranks() == [2, 2]
        group.close()
        assert sorted(file.name for file in tmp_path.iterdir()) == ["closed-0", "closed-1"]
        assert {file.read_text() for file in tmp_path.iterdir()} == {"2"}
        assert "close() of role 'wrong' has raised" in capfd.readouterr().err

    @needs(OwnProcess)
    def test_borrowed_weights(self, spawn: Spawn) -> None:
        """`ctx.borrow` needs only the named tags awake, and its error lists the sleeping tags."""
        pytest.importorskip("torch")
        group = spawn({"actor": colocate.role(Dozing), "engine": colocate.role(Borrower)}, slots=1)
        engine = group.role("engine", Borrower)
        group.role("actor", Dozing).train()
        group.sleep("actor", ["optimizer", "grads"])
        assert engine.borrow("actor", ("weights",)) == engine.borrow("actor", ["weights", "cache"])
        with pytest.raises(RoleError, match=r"awake names 'weight'; a role's memory is of weights"):
            engine.borrow("actor", ("weight",))
        with pytest.raises((SleepingError, RoleError), match=r"memory of role 'actor' sleeps \(grads, optimizer\)"):
            engine.borrow("actor")
        assert group.role("actor", Dozing).list_asleep() == [["grads", "optimizer"]]

    def test_roles_that_need_a_process(self, spawn: Spawn) -> None:
        """Roles that need a process each can't share a slot, and can't run on threads."""
        role = colocate.role(LoneEngine)
        with self.connect() as runtime, runtime.reserve(slots=2) as pool:
            if not issubclass(type(runtime._node.services.executor), OwnProcess):
                with pytest.raises(CapabilityError, match=r"needs a process for each rank"):
                    pool.spawn({"one": role})
                return
            with pytest.raises(ConfigError, match=r"roles 'one' and 'other' each need a process .* slot 1"):
                pool.spawn({"one": role, "other": role.on(slots=[1])})
            group = pool.spawn({"one": role.on(slots=[0]), "other": role.on(slots=[1])})
            group.role("other", LoneEngine).nothing()
