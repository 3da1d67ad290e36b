"""`group.memory()`, in which each byte has one owner, and memory budgets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, cast

import attrs
import pytest
from tests.suite.probes.holders import Declarer, Training, WatchedHolder
from tests.suite.probes.plain import Ported
from tests.suite.probes.sleepers import Dozing, Sharing

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate._system.deadline import Deadline
from colocate._system.numbers import format_size
from colocate.errors import CapabilityError, ConfigError, MemoryBudgetError, RoleError, RoleStartError, SleepingError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.holders import Holding
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import PATIENCE_S

_MIB = 2**20
_SIZES_MIB = (1, 16, 64)


class LedgerSuite(ExecutorCase):
    """`group.memory()`: reports of the workers' memory."""

    @pytest.fixture
    def holding(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn two roles with models on two slots."""
        pytest.importorskip("torch")
        return spawn({"one": colocate.role(Holding), "other": colocate.role(Holding)})

    def test_memory_by_kind(self, holding: ColocatedGroup) -> None:
        """Memory is reported by role, rank and kind, also after growth and release."""
        one = holding.role("one", Holding)
        for slot in holding.memory().slots:
            assert [role.device for role in slot.roles] == [{"parameters": _MIB, "buffers": 4096}] * 2
        one.train()
        resident = one.make.keep(1000)
        resident.wait()
        for rank, slot in enumerate(holding.memory().slots):
            first, second = slot.roles
            assert (first.role, first.rank, first.complete) == ("one", rank, True)
            assert first.device == {
                "parameters": _MIB,
                "gradients": _MIB,
                "optimizer": _MIB,
                "buffers": 4096,
                "residents": 4000,
            }
            assert second.device == {"parameters": _MIB, "buffers": 4096}
        resident.free()
        one.make(1)  # This call carries the release to the workers.
        assert all("residents" not in slot.roles[0].device for slot in holding.memory().slots)

    def test_memory_that_roles_share(self, holding: ColocatedGroup) -> None:
        """Memory that roles share counts once, for the first owner; residents of a role's own weights add nothing."""
        holding.role("other", Holding).share("one")
        resident = holding.role("one", Holding).weights.keep()
        resident.wait()
        for slot in holding.memory().slots:
            one, other = slot.roles
            assert (one.device, one.shared) == ({"parameters": _MIB, "buffers": 4096}, 0)
            assert (other.device, other.shared) == ({}, _MIB + 4096)

    def test_memory_that_a_role_declares(self, spawn: Spawn) -> None:
        """`device_state` declares memory that can't be found; an error there fails the report with a traceback."""
        pytest.importorskip("torch")
        group = spawn({"declaring": colocate.role(Declarer)})
        assert [slot.roles[0].device for slot in group.memory().slots] == [{"declared": 4000}] * 2
        failing = spawn({"failing": colocate.role(Declarer, fails=True)})
        with pytest.raises(RoleError, match=r"role 'failing' of group .* could not be looked at.*rank \d can't") as e:
            failing.memory()
        assert "in device_state" in (e.value.remote_traceback or "")

    def test_non_method_under_hook_name_is_ignored(self, spawn: Spawn) -> None:
        """Attributes, properties and `__getattr__` under a hook's name aren't taken for hooks."""
        group = spawn({"ported": colocate.role(Ported)}, slots=1)
        assert [role.role for slot in group.memory().slots for role in slot.roles] == ["ported"]
        if isinstance(group._node.services.executor, OwnProcess):
            group.sleep("ported")
            group.wake("ported")
        assert group.role("ported", Ported).state() == ["idle"]
        group.close()

    def test_memory_beside_a_call(self, holding: ColocatedGroup) -> None:
        """`group.memory()` answers while a call runs."""
        with Gate() as gate:
            call = holding.role("one", Holding).wait_at.submit(gate.address)
            gate.wait_for(2)
            assert len(holding.memory(PATIENCE_S).slots) == 2
            gate.open()
            call.result(PATIENCE_S)

    def test_gradients_beside_a_call(self, spawn: Spawn) -> None:
        """During a call, gradients count as before the call, and no other thread reads one."""
        pytest.importorskip("torch")
        group = spawn({"one": colocate.role(WatchedHolder)})
        one = group.role("one", WatchedHolder)
        one.train()
        assert _gradient_bytes(group) == [4000] * 2
        with _drop_gradients(one):
            assert _gradient_bytes(group) == [4000] * 2
        assert _gradient_bytes(group) == [0] * 2
        assert one.read_elsewhere() == [False] * 2

    @needs(OwnProcess)
    def test_memory_adds_up(self, spawn: Spawn) -> None:
        """A worker's memory is the roles' memory plus a rest that doesn't depend on the roles' size."""
        pytest.importorskip("torch")
        other_sizes = []
        for mib in _SIZES_MIB:
            group = spawn({"training": colocate.role(Training, mib)}, slots=1)
            (parameters,) = group.role("training", Training).train(2)
            (slot,) = group.memory().slots
            owned = slot.roles[0].total
            assert owned == pytest.approx(4 * parameters, rel=0.001)  # Adam adds one number per tensor.
            assert sum(slot.unowned.values()) + owned == slot.process
            other_sizes.append(slot.unowned["other"])
            group.close()
        # All three have imported the same modules; `malloc` keeps part of a step's freed memory.
        assert 0 < max(other_sizes) <= min(other_sizes) + _SIZES_MIB[-1] * _MIB, other_sizes

    @needs(OwnProcess)
    def test_memory_of_a_stopped_worker(self, spawn: Spawn) -> None:
        """A stopped worker is named in the TimeoutError, and `ask_each` still returns the other workers' answers."""
        group = spawn({"echo": colocate.role(Echo)})
        pid = group.role("echo", Echo).place()[1][0]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError, match=r"worker 1 of group .* has not reported its memory use in time"):
                group.memory(timeout=0.5)
            answers, why = cast("Any", group._node.get_part("memory")).ask_each(Deadline(0.5))
            assert [*answers] == [0]
            assert "worker 1 of group" in str(why)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert len(group.memory(PATIENCE_S).slots) == 2

    @needs_feature("looking")
    def test_memory_in_the_graph(self, runtime: Runtime, holding: ColocatedGroup) -> None:
        """The ownership graph shows each role's memory if asked."""
        tree = runtime.graph.render("tree", memory=True)
        assert tree.count("(Holding, 1 MiB)") == 4, tree
        assert "(Holding)" in runtime.graph.render("tree")
        assert holding.name in tree

    def test_memory_report_formats(self, holding: ColocatedGroup) -> None:
        """A memory report renders as text, HTML, rows and JSON."""
        report = holding.memory()
        text = str(report)
        assert text.startswith(f"memory of group {holding.name!r}\n")
        assert "1 MiB" in text
        assert "gradients" not in text  # No role has gradients.
        assert [row["total"] for row in report.rows()] == [_MIB + 4096] * 4
        assert json.loads(report.json())["slots"][1]["roles"][0]["device"] == {"parameters": _MIB, "buffers": 4096}
        assert "<table>" in report._repr_html_()
        totals = [line for line in text.splitlines() if " in all: " in line]
        assert len(totals) == sum(slot.process is not None for slot in report.slots)
        for line, slot in zip(totals, report.slots, strict=False):
            assert slot.process is not None
            whole = f"slot {slot.slot} in all: {format_size(slot.process)} of the host for its process"
            assert 0 <= slot.shared_with_forks < slot.process
            forks = f" ({format_size(slot.shared_with_forks)} of that shared with workers that are forks as it is)"
            assert line == whole + (forks if slot.shared_with_forks else "")
        gpu = {"used": 5 * _MIB, "total": 80 * _MIB, "allocated": 0, "reserved": 0}
        on_gpu = attrs.evolve(report, slots=(attrs.evolve(report.slots[0], gpu=gpu, device="cuda:0"),))
        assert str(on_gpu).endswith("5 MiB of 80 MiB of cuda:0 for all processes")


@contextlib.contextmanager
def _drop_gradients(view: WatchedHolder) -> Iterator[None]:
    """Run a block while a call of the role has dropped the gradients."""
    with Gate() as gate:
        call = view.let_go.submit(gate.address)
        gate.wait_for(2)
        yield
        gate.open()
        call.result(PATIENCE_S)


def _gradient_bytes(group: ColocatedGroup) -> list[int]:
    """Return the first role's gradient bytes by slot."""
    return [slot.roles[0].device.get("gradients", 0) for slot in group.memory(PATIENCE_S).slots]


class Budgets(ExecutorCase):
    """Memory budgets of roles, groups and slots."""

    def test_budget_of_a_role(self, spawn: Spawn) -> None:
        """A call that exceeds the role's budget fails with a memory listing, and the group stays usable."""
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
        actor.let_go()
        assert actor.look() != before  # The step has taken effect.

    @needs(OwnProcess)
    def test_budget_of_a_group(self, spawn: Spawn) -> None:
        """A group's budget counts roles and residents but no sleeping memory; a wake beyond the budget is refused."""
        pytest.importorskip("torch")
        group = spawn({"one": colocate.role(Dozing, 1), "other": colocate.role(Dozing, 1)}, device_memory="7MiB")
        one, other = group.role("one", Dozing), group.role("other", Dozing)
        group.sleep("one")
        resident = other.make.keep(_MIB + 2**14)
        resident.wait()
        with pytest.raises(MemoryBudgetError, match=r"waking role 'one' needs .*the group may have 7 MiB"):
            group.wake("one")
        with pytest.raises(SleepingError, match="could not be woken"):
            one.look()
        with pytest.raises(MemoryBudgetError, match=r"after other\.make, .*residents 6\.1 MiB"):
            other.make.keep(_MIB // 2).wait()
        assert [role.role for role in group.memory().slots[0].roles] == ["one", "other"]  # No row for functions.
        assert len(other.make(_MIB)) == 2  # A result in transit doesn't count.
        resident.free()
        assert group.wake("one")

    def test_budget_of_a_slot(self, runtime: Runtime) -> None:
        """A slot's budget, set on the pool, applies to each group there."""
        pytest.importorskip("torch")
        with runtime.reserve(1, cpus=0, device_memory="1MiB") as pool:
            with pytest.raises(RoleStartError, match="the pool's slots may have 1 MiB") as error:
                pool.spawn({"actor": colocate.role(Dozing, 1)})
            assert isinstance(error.value.errors[0], MemoryBudgetError)
            with pytest.raises(ConfigError, match=r"role 'actor' can't fit: it may have 2 MiB \(device_memory\)"):
                pool.spawn({"actor": colocate.role(Dozing, 1).on(device_memory="2MiB")})

    def test_memory_for_activations(self, spawn: Spawn) -> None:
        """Memory for activations stays free while the role runs, and only then."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 1).on(reserve_activations="1500KiB"), "other": colocate.role(Dozing, 1)}
        group = spawn(roles, device_memory="5MiB")
        assert len(group.role("other", Dozing).look()) == 2
        with pytest.raises(MemoryBudgetError, match=r"with 1\.5 MiB to stay free for activations"):
            group.role("one", Dozing).look()

    def test_no_memory_left(self, spawn: Spawn) -> None:
        """An out-of-memory error lists the memory's owners, and the group stays usable."""
        pytest.importorskip("torch")
        group = spawn({"actor": colocate.role(Dozing, 1)})
        actor = group.role("actor", Dozing)
        with pytest.raises(RoleError, match=r"can't allocate memory|out of memory") as error:
            actor.make(2**50)
        assert "memory of this worker: actor 2 MiB (parameters 1 MiB" in str(error.value)
        assert actor.train()

    @needs(OwnProcess)
    @needs_feature("checkpoints")
    def test_a_checkpoint_wakes_one_role_at_a_time(self, spawn: Spawn, tmp_path: Any) -> None:
        """A checkpoint wakes one role at a time: the budget has no room for all roles together."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Dozing, 1), "other": colocate.role(Dozing, 1)}
        group = spawn(roles, device_memory="7MiB")
        sums = {}
        for name in roles:
            sums[name] = group.role(name, Dozing).train()
            group.sleep(name)
        group.checkpoint(tmp_path / "saved")
        assert all(role.asleep >= 3 * _MIB for slot in group.memory().slots for role in slot.roles)
        for name in roles:
            assert group.role(name, Dozing).look() == sums[name]
            group.sleep(name)

    def test_roles_on_threads_do_not_sleep(self, runtime: Runtime, spawn: Spawn) -> None:
        """On threads sleep is refused, also before a start: other roles use the memory by reference."""
        if isinstance(runtime._node.services.executor, OwnProcess):
            pytest.skip("its slots are processes")
        pytest.importorskip("torch")
        roles = {"actor": colocate.role(Dozing, 1)}
        group = spawn(roles, device_memory="1GiB")
        refused: dict[str, Callable[[], Any]] = {
            r"have a role sleep \(group\.sleep\)": lambda: group.sleep("actor"),
            r"have roles take turns, for which they sleep": lambda: spawn(
                roles, residency="swap", device_memory="1GiB"
            ),
            r"have roles sleep \(spill_dir=\)": lambda: self.connect(spill_dir="/var/tmp"),
        }
        for words, sleeps in refused.items():
            with pytest.raises(CapabilityError, match=rf"can't {words}.* lacks OwnProcess.*local with processes") as e:
                sleeps()
            assert e.value.capability == "OwnProcess"
        assert group.wake("actor") == 0
        assert group.role("actor", Dozing).train()

    def test_budgets_that_can_not_be(self, runtime: Runtime) -> None:
        """Impossible budgets are refused before anything starts."""
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
            pattern = r"the group may have 2 MiB \(device_memory\), and the pool's slots have 1 MiB for it"
            with pytest.raises(ConfigError, match=pattern):
                pool.spawn({"a": role}, device_memory="2MiB")
