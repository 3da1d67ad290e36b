"""`group.sleep` and `group.wake`: memory is offloaded and brought back, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.suite.marks import mark_executor_part
from tests.suite.probes.sleepers import Dozing, Sharing, digest
from tests.suite.probes.trainers import Renewing, train_alone
from tests.suite.probes.unfinished import Accumulating, Hooked, Unfinished

import colocate
from colocate import ColocatedGroup
from colocate._role.method import Tag
from colocate.errors import (
    ConfigError,
    MemoryBudgetError,
    PipelineError,
    RoleError,
    SleepingError,
)
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.waiting import PATIENCE_S, wait_until

_MIB = 2**20
_MIBS = 8
_MOST = 0.98  # The share that a sleep must free: pages at the ends of tensors stay.


class Dozers(ExecutorCase):
    """Roles that can sleep."""

    @pytest.fixture
    def dozing(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn a trained model on two slots."""
        pytest.importorskip("torch")
        group = spawn({"actor": colocate.role(Dozing, _MIBS), "other": colocate.role(Sharing)})
        group.role("actor", Dozing).train()
        return group


@needs(OwnProcess)
class Sleeping(Dozers):
    """Sleep and wake of a role's memory."""

    @mark_executor_part
    def test_sleep_and_wake(self, dozing: ColocatedGroup) -> None:
        """After a wake all objects and bits are as before, including tied weights and views."""
        actor = dozing.role("actor", Dozing)
        before, where = actor.digest(), actor.objects()
        size = sum(slot.roles[0].total for slot in dozing.memory().slots)
        assert size >= 2 * 3 * _MIBS * _MIB
        freed = dozing.sleep("actor")
        assert freed == size
        assert dozing.memory().slots[0].roles[0].asleep == freed / 2
        assert dozing.wake("actor") == freed
        assert dozing.memory().slots[0].roles[0].asleep == 0
        assert (actor.digest(), actor.objects()) == (before, where)

    def test_array_sharing_tensor_memory_stays_valid(self, dozing: ColocatedGroup) -> None:
        """An array that shares a tensor's memory stays valid after a sleep: the memory stays in place."""
        actor = dozing.role("actor", Dozing)
        if actor.is_on_gpu()[0]:
            pytest.skip("arrays are of the host")
        before = actor.look_by_array()
        dozing.sleep("actor")
        role = dozing.memory().slots[0].roles[0]
        assert role.kept_awake == {"of an array, a file or another library": _MIBS * _MIB}
        assert role.asleep >= 3 * _MIBS * _MIB
        actor.train()
        assert actor.look_by_array() != before
        assert actor.look_by_array() == [float(array.numpy()[:, 1:].sum()) for array in actor.weights()]

    def test_sleep_frees_memory(self, spawn: Spawn) -> None:
        """A sleep reduces the process's memory by the freed bytes, and a wake adds the same again."""
        pytest.importorskip("torch")
        dozing = spawn({"actor": colocate.role(Dozing, 64)}, slots=1)
        dozing.sleep("actor")
        dozing.wake("actor")  # The first sleep and wake import modules.
        awake = [slot.process or 0 for slot in dozing.memory().slots]
        freed = dozing.sleep("actor")
        asleep = [slot.process or 0 for slot in dozing.memory().slots]
        assert all(more - less >= _MOST * freed for more, less in zip(awake, asleep, strict=True)), (
            awake,
            asleep,
            freed,
        )
        dozing.wake("actor")
        again = [slot.process or 0 for slot in dozing.memory().slots]
        assert all(abs(one - other) <= 0.05 * freed for one, other in zip(awake, again, strict=True)), (awake, again)

    def test_a_call_wakes(self, dozing: ColocatedGroup) -> None:
        """A call on a sleeping role wakes only the tags that it needs, and returns the usual result."""
        actor = dozing.role("actor", Dozing)
        before = actor.digest()
        dozing.sleep("actor")
        assert actor.look() == [weights for weights, _ in before]  # `look` needs only the weights.
        assert actor.list_asleep() == [["grads", "optimizer", "cache"]] * 2
        assert actor.digest() == before
        assert actor.list_asleep() == [[]] * 2
        dozing.sleep("actor")
        resident = actor.weights.keep()
        resident.wait()
        assert actor.list_asleep() == [[]] * 2

    @needs_feature("checkpoints")
    def test_a_call_that_fails_of_sleep(self, dozing: ColocatedGroup, tmp_path: Path) -> None:
        """With `on_call="fail"` a call on sleeping memory is refused, and a checkpoint leaves the role asleep."""
        actor = dozing.role("actor", Dozing)
        before = actor.digest()
        dozing.sleep("actor", ["optimizer", "grads"], on_call="fail")
        assert actor.look() == [weights for weights, _ in before]
        for _ in range(2):
            with pytest.raises(SleepingError, match=r"actor\.digest .*sleeping .*optimizer.*group\.wake\('actor'\)"):
                actor.digest()
        assert actor.list_asleep() == [["grads", "optimizer"]] * 2
        dozing.wake("actor")
        assert actor.digest() == before
        dozing.sleep("actor", on_call="fail")
        asleep = actor.list_asleep()
        dozing.checkpoint(tmp_path / "checkpoint")
        assert actor.list_asleep() == asleep
        with pytest.raises(SleepingError, match=r"actor\.digest .*sleeping memory"):
            actor.digest()
        dozing.wake("actor")
        assert actor.digest() == before
        with pytest.raises(ConfigError, match=r"on_call='fial'.*did you mean 'fail'"):
            dozing.sleep("actor", on_call="fial")  # type: ignore[arg-type]

    @needs_feature("checkpoints")
    def test_discard(self, dozing: ColocatedGroup, tmp_path: Path) -> None:
        """Discarded tags come back as zeros in place and other tags unchanged; later contents survive a sleep."""
        actor = dozing.role("actor", Dozing)
        before, where = actor.parts(), actor.objects()
        assert {*before[0]} == {"weights", "grads", "optimizer", "cache"}
        assert dozing.sleep("actor", discard=("grads", "cache")) >= _MOST * 2 * 4 * _MIBS * _MIB
        assert actor.look() == [part["weights"] for part in before]  # The other tags stay asleep.
        assert actor.list_asleep() == [["grads", "optimizer", "cache"]] * 2
        after = [{tag: part[tag] for tag in ("weights", "optimizer")} for part in before]
        assert (actor.parts(), actor.objects()) == (after, where)
        actor.train()
        before = actor.parts()
        assert all("grads" in part for part in before)
        dozing.sleep("actor")
        assert actor.parts() == before
        dozing.sleep("actor", ["optimizer", "grads"])
        dozing.sleep("actor", ["optimizer", "grads"], discard=["grads"])  # Discards a tag that already sleeps.
        dozing.checkpoint(tmp_path / "checkpoint")
        after = [{tag: digest for tag, digest in part.items() if tag != "grads"} for part in before]
        assert (actor.parts(), actor.objects()) == (after, where)

    def test_discard_spares_used_contents(self, dozing: ColocatedGroup) -> None:
        """A discard spares contents that another role or a resident uses."""
        actor, other = dozing.role("actor", Dozing), dozing.role("other", Sharing)
        resident = actor.caches.keep()
        before, cached = actor.parts(), [digest(tensor) for tensor in resident.fetch()]
        dozing.sleep("actor", discard=["cache"])
        assert [digest(tensor) for tensor in resident.fetch()] == cached
        assert actor.parts() == before
        resident.free()
        other.share("actor")  # Shares the gradients of the model, too.
        dozing.sleep("other")
        dozing.sleep("actor", discard=["grads", "cache"])
        assert [{*part} for part in actor.parts()] == [{*before[0]} - {"cache"}] * 2

    def test_sleep_that_keeps_addresses(self, spawn: Spawn) -> None:
        """With `sleep="vmm"` results equal an ordinary role's, and on a GPU addresses stay the same."""
        pytest.importorskip("torch")
        roles = {"kept": colocate.role(Dozing, 1).on(sleep="vmm"), "usual": colocate.role(Dozing, 1)}
        group = spawn(roles)
        at_address, usual = group.role("kept", Dozing), group.role("usual", Dozing)
        places = at_address.addresses()
        for _ in range(2):
            assert group.sleep("kept")
            assert at_address.train() == usual.train()
            assert group.sleep("kept", ("weights",))
            group.wake("kept")
            assert at_address.digest() == usual.digest()
            if at_address.is_on_gpu()[0]:
                assert at_address.addresses() == places

    def test_sleep_spares_used_memory(self, dozing: ColocatedGroup) -> None:
        """Memory in use by an awake role or a resident stays, and is reported; without users a sleep frees it."""
        actor, other = dozing.role("actor", Dozing), dozing.role("other", Sharing)
        other.share("actor")
        before, looked = other.digest(), actor.look()
        resident = actor.weights.keep()
        resident.wait()
        weights = 2 * _MIBS * _MIB
        assert dozing.sleep("actor", ("weights",)) < weights / 10
        report = dozing.memory()
        users = "used by role 'other' and residents"
        assert [role.kept_awake[users] for slot in report.slots for role in slot.roles[:1]] == [weights // 2] * 2
        line = f"slot 1: role 'actor' sleeps but for {_MIBS} MiB {users}"
        assert any(text.startswith(line) for text in str(report).splitlines())
        assert dozing.sleep("other") < weights / 10  # The resident still uses the weights.
        dozing.wake("actor")
        dozing.wake("other")
        resident.free()
        assert dozing.sleep("actor", ("weights",)) < weights / 10
        assert dozing.sleep("other") >= _MOST * weights
        assert other.digest() == before
        assert dozing.sleep("other") >= _MOST * weights
        assert actor.look() == looked

    def test_wake_without_room(self, dozing: ColocatedGroup) -> None:
        """A wake without room leaves the role asleep on all ranks; the error of a wake or call says why."""
        actor = dozing.role("actor", Dozing)
        before = actor.digest()
        dozing.sleep("actor")
        actor.lack_room(0)
        refused = r"could not be woken, and is as it was: rank 0 \(node .*are needed"
        with pytest.raises(MemoryBudgetError, match=refused) as caught:
            dozing.wake("actor")
        assert caught.value.remote_traceback is None
        assert "memory of group" in caught.value.__notes__[0]
        with pytest.raises(SleepingError, match=r"actor\.digest needs sleeping memory of its role.*are needed"):
            actor.digest()
        assert actor.list_asleep() == [["weights", "grads", "optimizer", "cache"]] * 2
        actor.lack_room(None)
        assert actor.digest() == before

    def test_hooks_of_sleep(self, spawn: Spawn) -> None:
        """Sleep and wake hooks run on all ranks, and the wake hook also after a sleep that failed on another rank."""
        pytest.importorskip("torch")
        group = spawn({"actor": colocate.role(Dozing, 1, hooks=True)})
        actor = group.role("actor", Dozing)
        group.sleep("actor", ("cache",))
        assert actor.told() == [["sleep cache"]] * 2
        group.wake("actor")
        assert actor.told() == [["sleep cache", "wake cache"]] * 2
        actor.fail_hook(1, RuntimeError("its engine is busy"))
        with pytest.raises(
            RoleError, match=r"could not be put to sleep.*rank 1 \(node .*RuntimeError: its engine is busy"
        ) as raised:
            group.sleep("actor", ("cache",))
        assert "in _sleep" in (raised.value.remote_traceback or "")
        assert actor.told() == [
            ["sleep cache", "wake cache", "sleep cache", "wake cache"],
            ["sleep cache", "wake cache"],
        ]
        assert actor.list_asleep() == [[]] * 2

    def test_invalid_sleep_arguments_are_refused(self, dozing: ColocatedGroup) -> None:
        """Unknown roles, tags and options of sleep are refused with the accepted values."""
        with pytest.raises(
            ConfigError, match=r"group .* has no such role: it has actor, other; did you mean 'actor'\?"
        ):
            dozing.sleep("actr")
        with pytest.raises(ConfigError, match=r"takes the name of one role, as in group.sleep\('actor'\)"):
            dozing.sleep(["actor", "other"])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"on_call=True\): it is 'wake' or 'fail'"):
            dozing.sleep("actor", on_call=True)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is a string"):
            dozing.sleep("actor", "weights")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="names 'weight'; a role's memory is of weights, grads, optimizer, cache"):
            dozing.wake("actor", ["weight"])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match=r"sleep='vnm': it is \"vmm\""):
            colocate.role(Dozing).on(sleep="vnm")  # type: ignore[arg-type]


def _touch_memory(ctx: colocate.Context) -> int:
    nbytes: int = ctx.sibling("actor", Dozing).net.weight.nbytes
    return nbytes


@needs(OwnProcess)
class SleepingBeside(Dozers):
    """Sleep and wake beside calls, pipelines, residents, checkpoints and failures."""

    @needs_feature("pipelines")
    def test_sleep_in_a_pipeline(self, dozing: ColocatedGroup) -> None:
        """Calls of a pipeline wake their role; `sleep` and `wake` inside a pipeline are refused."""
        actor = dozing.role("actor", Dozing)
        before = actor.digest()
        dozing.sleep("actor")
        with dozing.pipeline():
            first, second = actor.look.submit(), actor.digest.submit()
            with pytest.raises(PipelineError, match=r"the sleep of actor would wait .*: call it before or after the"):
                dozing.sleep("actor")
            with pytest.raises(PipelineError, match=r"the wake of actor would wait .*: call it before or after the"):
                dozing.wake("actor")
        assert second.result(PATIENCE_S) == before
        assert first.result(PATIENCE_S)

    def test_residents_of_a_sleeping_role(self, dozing: ColocatedGroup) -> None:
        """Residents of a sleeping role can be used by value and by reference."""
        actor, other = dozing.role("actor", Dozing), dozing.role("other", Sharing)
        resident = actor.make.keep(_MIB)
        resident.wait()
        dozing.sleep("actor")
        assert other.total(resident.ref) == [2.0 * _MIB] * 2
        assert len(resident.fetch()) == 2
        assert actor.list_asleep.options(ranks=[0])()  # `list_asleep` needs no memory awake.

    @needs_feature("functions")
    def test_sibling_of_a_sleeping_role(self, dozing: ColocatedGroup) -> None:
        """Access to a sleeping sibling, from a role or a function, raises an error that names `group.wake`."""
        other = dozing.role("other", Sharing)
        dozing.sleep("actor")
        for reach in (lambda: other.share("actor"), lambda: dozing.run(_touch_memory)):
            with pytest.raises(RoleError, match=r"memory of role 'actor' sleeps.*group\.wake\('actor'\)") as caught:
                reach()
            assert isinstance(caught.value.__cause__, SleepingError)
        dozing.wake("actor")
        other.share("actor")
        assert dozing.run(_touch_memory) == [_MIBS * _MIB] * 2

    @needs_feature("checkpoints")
    def test_checkpoint_of_a_sleeping_role(self, dozing: ColocatedGroup, tmp_path: Path) -> None:
        """A checkpoint saves a sleeping role awake, then puts the same memory back to sleep and no newer memory."""
        actor = dozing.role("actor", Dozing)
        dozing.sleep("actor", ["optimizer", "cache"])
        actor.refill(_MIBS)

        def look() -> tuple[list[list[str]], list[list[int]]]:
            roles = [slot.roles for slot in dozing.memory().slots]
            return actor.list_asleep(), [[role.asleep, role.total] for role_memory in roles for role in role_memory]

        before = look()
        dozing.checkpoint(tmp_path / "c")  # `Dozing.save` asserts that the role is awake.
        assert look() == before
        digest = actor.digest()
        dozing.sleep("actor")
        dozing.checkpoint(tmp_path / "c")
        assert actor.list_asleep() == [["weights", "grads", "optimizer", "cache"]] * 2
        assert actor.digest() == digest

    @needs_feature("process_groups")
    def test_sleep_of_a_model_in_shards(self, spawn: Spawn) -> None:
        """With FSDP2 each rank's shards count as its memory, and training across sleeps gives the usual losses."""
        pytest.importorskip("torch")
        group = spawn({"trainer": colocate.role(Renewing, "fsdp2")})
        trainer = group.role("trainer", Renewing)
        expected, weights = train_alone()
        size = sum(value.nbytes for value in weights.values())
        parts = [slot.roles[0].device["parameters"] for slot in group.memory().slots]
        assert size <= sum(parts) <= 1.25 * size  # torch pads uneven shards.
        losses = []
        for number, _ in enumerate(expected):
            group.sleep("trainer", discard=("grads", "cache") if number % 2 else ())
            losses.append(sum(trainer.step(number)) / 2)
        assert losses == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("what", ["sleep", "wake", "call"])
    def test_while_an_earlier_call_fails(self, dozing: ColocatedGroup, what: str) -> None:
        """A sleep, wake or call that waits for a rank whose earlier call fails completes on all ranks afterwards."""
        actor, other = dozing.role("actor", Dozing), dozing.role("other", Sharing)
        before = actor.digest()
        if what != "sleep":
            dozing.sleep("actor")
        with Gate() as gate, ThreadPoolExecutor(1) as pool:
            failed = other.fail_at.options(ranks=[1]).submit(gate.address)
            gate.wait_for(1)
            doing: dict[str, Callable[[], Any]] = {
                "sleep": partial(dozing.sleep, "actor"),
                "wake": partial(dozing.wake, "actor"),
                "call": actor.digest,
            }
            done = pool.submit(doing[what])
            wait_until(lambda: dozing._node.questions._meetings, "rank 0 waits for rank 1")
            gate.open()
            with pytest.raises(RoleError, match="a bad batch"):
                failed.result(PATIENCE_S)
            assert done.result(PATIENCE_S)
        assert actor.list_asleep() == [["weights", "grads", "optimizer", "cache"] if what == "sleep" else []] * 2
        assert actor.digest() == before


_SUMMED_MIBS = 64


@needs(OwnProcess)
class SleepingAmidSteps(ExecutorCase):
    """Unfinished state of a training step survives a sleep between two calls."""

    def test_gradients_that_are_not_reduced_yet(self, spawn: Spawn) -> None:
        """Gradients that FSDP2 hasn't reduced yet count as gradients, and survive a discard of the cache."""
        torch = pytest.importorskip("torch")
        group = spawn({"one": colocate.role(Accumulating), "other": colocate.role(Accumulating)})
        one, other = group.role("one", Accumulating), group.role("other", Accumulating)
        for number in range(3):
            for trainer in (one, other):
                trainer.accumulate(number, number == 2)
            kinds = {row["role"]: row["gradients"] for row in group.memory().rows() if row["role"] in ("one", "other")}
            assert all(kinds.values()), kinds
            group.sleep("one", discard=["cache"])
        for mine, expected in zip(one.update(), other.update(), strict=True):
            assert torch.equal(mine, expected)

    def test_a_graph_and_hooks(self, spawn: Spawn) -> None:
        """An autograd graph with saved weights survives a sleep, and hooks run in the same order as without one."""
        torch = pytest.importorskip("torch")
        group = spawn({"one": colocate.role(Hooked), "other": colocate.role(Hooked)})
        one, other = group.role("one", Hooked), group.role("other", Hooked)
        orders: list[Sequence[Tag] | None] = [None, ["weights"], ["optimizer", "grads"], None]
        for number, tags in enumerate(orders):
            assert one.begin(number) == other.begin(number)
            assert group.sleep("one", tags) > 0
            for (mine, heard), (expected_grads, expected) in zip(one.end(), other.end(), strict=True):
                assert all(torch.equal(*pair) for pair in zip(mine, expected_grads, strict=True))
                assert heard == expected
                assert {*heard} >= {"forward ends", "backward ends", "gradient", "update", "step"}
            group.sleep("one")

    def test_operations_under_way(self, spawn: Spawn) -> None:
        """A sleep waits for operations that still write, also on a rank that begins late."""
        pytest.importorskip("torch")
        group = spawn({"role": colocate.role(Unfinished, _SUMMED_MIBS)})
        role = group.role("role", Unfinished)
        for _ in range(2):
            with Gate() as gate:
                role.begin_sum.submit(gate.address)
                gate.wait_for()
                with ThreadPoolExecutor(1) as pool:
                    sleeping = pool.submit(group.sleep, "role")
                    gate.open()
                    assert sleeping.result() > 0
            assert role.end() == [(3.0, 3.0)] * 2
