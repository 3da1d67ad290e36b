"""`colocate.sync_weights`: weights are copied to another role, on all ranks or on none."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.suite.marks import mark_executor_part
from tests.suite.weights.probes import (
    Asker,
    Checked,
    Declared,
    Failure,
    Fault,
    Giver,
    Halves,
    Learner,
    Plain,
    Scaling,
    Sharer,
    Swapper,
    Taker,
    Unsaved,
)

import colocate
from colocate import ColocatedGroup
from colocate.driver import Driver
from colocate.errors import (
    CallTimeout,
    ColocateError,
    ConfigError,
    GroupRestarted,
    PipelineError,
    RoleError,
    SleepingError,
    StaleWeightsError,
    WeightsDifferError,
    WorkerDied,
)
from colocate.executor import OwnProcess
from colocate.testing import assert_same_weights
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.waiting import PATIENCE_S, wait_until


def _sum_weights(role: Any) -> list[list[float]]:
    return [sums for sums, _ in role.look()]


def show_tree(group: ColocatedGroup) -> str:
    """Return the rendered ownership graph of a group's runtime."""
    return group.owner.owner.graph.render()  # type: ignore[no-any-return]


class TakesNoVersion(colocate.Role):
    """A target whose `load_weights` lacks the version parameter."""

    def load_weights(self, weights: colocate.Weights) -> None:
        """Load nothing."""

    @colocate.method
    def nothing(self) -> None:
        """Do nothing: a role needs a method."""


class GivesNone(colocate.Role):
    """A source whose `named_weights` raises."""

    def named_weights(self) -> Iterator[tuple[str, object]]:
        """Raise."""
        raise ValueError("none to be had")
        yield

    @colocate.method
    def nothing(self) -> None:
        """Do nothing: a role needs a method."""


class WeightSyncs(ExecutorCase):
    """Syncs from one role to another in the same workers."""

    @pytest.fixture
    def both(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn a source and a target on two slots."""
        pytest.importorskip("torch")
        return spawn({"giver": colocate.role(Giver), "taker": colocate.role(Taker, seed=1)})

    @needs_feature("memory")
    def test_weights_in_a_slot(self, both: ColocatedGroup) -> None:
        """After a sync the target has the source's weights, tied ones included, and a version that counts syncs."""
        giver, taker = both.role("giver", Giver), both.role("taker", Taker)
        assert _sum_weights(giver) != _sum_weights(taker)
        for version in (1, 2):
            done = colocate.sync_weights(giver, taker)
            assert (done.version, done.by) == (version, ("reference",))
            assert done.nbytes == 4 * (8 * 8 + 8 + 8 + 8 * 8)
            assert taker.look() == [(sums, version) for sums, _ in giver.look()]
            giver.step()
        wait_until(lambda: "role 'taker' has weights version 2, " in str(both.memory()), "the table says it")

    def test_a_submitted_failure_of_a_sync_is_logged(self, spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
        """A submitted sync that fails is logged each time its handle is dropped unread, also between two groups."""
        pytest.importorskip("torch")
        takers = {"taker": colocate.role(Taker, seed=1)}
        source = spawn({"giver": colocate.role(GivesNone), **takers}, slots=1)
        giver = source.role("giver", GivesNone)
        for group in (source, spawn(takers, slots=1)):
            for _ in range(3):
                sync = colocate.sync_weights.submit(giver, group.role("taker", Taker))
                wait_until(sync.done, "it has failed")
                assert "none to be had" not in caplog.text
                del sync
                wait_until(lambda: "none to be had" in caplog.text, "it is logged")
                (record,) = (
                    log_record for log_record in caplog.records if "never asked for" in log_record.getMessage()
                )
                assert record.getMessage().startswith("the sync of giver to taker of group ")
                caplog.clear()

    def test_sync_keeps_place_in_call_order(self, both: ColocatedGroup) -> None:
        """Calls sent before a sync run first, and calls sent after the sync see the new weights."""
        giver, taker = both.role("giver", Giver), both.role("taker", Taker)
        colocate.sync_weights(giver, taker)
        with Gate() as gate:
            giver.step.submit(gate.address)
            sync = colocate.sync_weights.submit(giver, taker)
            after = taker.look.submit()
            giver.step.submit()
        before = _sum_weights(giver)
        assert sync.result(PATIENCE_S).version == 2
        weight_sums = [sums for sums, _ in after.result(PATIENCE_S)]
        assert all(
            sum(sums) == pytest.approx(sum(now) - 2 * 64 - 8) for sums, now in zip(weight_sums, before, strict=True)
        )

    @needs_feature("memory")
    @needs_feature("looking")
    def test_shared_weights(self, spawn: Spawn) -> None:
        """Shared weights are the same tensors, and a write by the source makes the target stale until the next sync."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver), "taker": colocate.role(Sharer, seed=1)})
        giver, taker = group.role("giver", Giver), group.role("taker", Sharer)
        assert colocate.sync_weights(giver, taker).by == ("shared",)
        assert taker.address() == giver.address()
        assert [role.total for slot in group.memory().slots for role in slot.roles if role.role == "taker"] == [
            1 << 20
        ] * 2
        taker.generate()
        giver.step()
        group.memory()  # The driver learns of the write through this report.
        assert re.search(
            r"role taker rank 0/2 .*weights version 1, \d+ s old, not in sync: the role whose", show_tree(group)
        )
        with pytest.raises(StaleWeightsError, match=r"taker\.generate .*version is 1\).*has written into them"):
            taker.generate()
        assert colocate.sync_weights(giver, taker).version == 2
        assert "not in sync" not in str(group.memory()) + show_tree(group)
        assert taker.look() == [(sums, 2) for sums, _ in giver.look()]
        with pytest.raises(ConfigError, match="shares the tensors"):
            colocate.sync_weights(giver, taker, dtype="bfloat16")

    def test_a_failure_amid_a_sync_of_shared_weights(self, spawn: Spawn) -> None:
        """A failure amid a sync of shared weights leaves the target stale until the next sync."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver), "taker": colocate.role(Sharer, seed=1)})
        giver, taker = group.role("giver", Giver), group.role("taker", Sharer)
        taker.fail(1, "raises")
        with pytest.raises(RoleError, match=r"raised .*Failure on rank 1"):
            colocate.sync_weights(giver, taker)
        with pytest.raises(StaleWeightsError):
            taker.generate()
        taker.fail(1, None)
        assert colocate.sync_weights(giver, taker).version == 1

    @needs_feature("memory")
    @needs_feature("checkpoints")
    def test_use_of_stale_weights_is_refused(self, spawn: Spawn, tmp_path: Path) -> None:
        """A sibling role, and a group restored from a checkpoint of stale weights, may not use these weights."""
        pytest.importorskip("torch")
        roles: dict[str, Any] = {
            "giver": colocate.role(Giver),
            "taker": colocate.role(Taker, seed=1),
            "asker": colocate.role(Asker),
        }
        group = spawn(roles, slots=1)
        giver, taker, asker = group.role("giver", Giver), group.role("taker", Taker), group.role("asker", Asker)
        colocate.sync_weights(giver, taker)
        assert asker.look("taker") == [2]
        taker.fail(0, "raises")
        with pytest.raises(RoleError, match="Failure"):
            colocate.sync_weights(giver, taker)
        with pytest.raises(RoleError, match="what asks for role 'taker' in its worker can't run"):
            asker.look("taker")
        group.checkpoint(tmp_path / "saved")
        other = spawn(roles, slots=1, restore=tmp_path / "saved")
        assert "role 'taker' has weights version 1, not in sync: it was restored since" in str(other.memory())
        with pytest.raises(StaleWeightsError, match="restored since"):
            other.role("taker", Taker).generate()
        assert colocate.sync_weights(other.role("giver", Giver), other.role("taker", Taker)).version == 2

    @needs_feature("checkpoints")
    def test_weights_both_ways_after_a_restore(self, spawn: Spawn, tmp_path: Path) -> None:
        """A restored role is a source again, unless the checkpoint has the partial weights of a failed sync."""
        pytest.importorskip("torch")
        roles = {"one": colocate.role(Swapper), "other": colocate.role(Swapper, seed=1)}
        group = spawn(roles, slots=1)
        one, other = group.role("one", Swapper), group.role("other", Swapper)
        colocate.sync_weights(one, other)
        colocate.sync_weights(other, one)
        group.checkpoint(tmp_path / "whole")
        before = _sum_weights(one)
        one.step()
        other.fail(0, "raises")
        with pytest.raises(RoleError, match="Failure"):
            colocate.sync_weights(one, other)
        other.fail(0, None)
        with pytest.raises(StaleWeightsError, match="had come"):
            colocate.sync_weights(other, one)
        group.checkpoint(tmp_path / "half")
        for _ in range(2):
            group.restore(tmp_path / "whole")
            with pytest.raises(StaleWeightsError, match=r"restored since from a checkpoint\. "):
                one.step()
            colocate.sync_weights(other, one)
            assert _sum_weights(one) == before
            colocate.sync_weights(one, other)
            assert _sum_weights(other) == before
            group.restore(tmp_path / "half")
            with pytest.raises(StaleWeightsError, match="where it was stale: a sync of one to it has failed"):
                colocate.sync_weights(other, one)

    @needs_feature("checkpoints")
    def test_weights_that_nothing_restored(self, spawn: Spawn, tmp_path: Path) -> None:
        """A role without `restore` can be a source after its group's restore, but in a new group only after a sync."""
        pytest.importorskip("torch")
        roles: dict[str, Any] = {
            "giver": colocate.role(Giver),
            "hub": colocate.role(Unsaved, seed=1),
            "late": colocate.role(Unsaved, seed=1).on(weights="from sync"),
            "taker": colocate.role(Taker, seed=2),
        }
        group = spawn(roles, slots=1)
        hub = group.role("hub", Unsaved)
        colocate.sync_weights(group.role("giver", Giver), hub)
        colocate.sync_weights(group.role("giver", Giver), group.role("late", Unsaved))
        before = _sum_weights(hub)
        group.checkpoint(tmp_path / "saved")
        group.restore(tmp_path / "saved")
        with pytest.raises(StaleWeightsError, match=r"other roles were restored since .* it has no restore\(\)\. "):
            hub.generate()
        colocate.sync_weights(hub, group.role("taker", Taker))
        assert _sum_weights(group.role("taker", Taker)) == before
        other = spawn(roles, slots=1, restore=tmp_path / "saved")
        taker = other.role("taker", Taker)
        expected = taker.look()
        for name, why in (("hub", "it has what its constructor has made"), ("late", "the role has no weights before")):
            with pytest.raises(
                StaleWeightsError, match=rf"the sync of {name} to taker can't run: .*restore\(\): {why}"
            ):
                colocate.sync_weights(other.role(name, Unsaved), taker)
        assert taker.look() == expected
        assert colocate.sync_weights(other.role("giver", Giver), other.role("hub", Unsaved)).version == 2

    def test_weights_that_do_not_fit(self, spawn: Spawn) -> None:
        """All mismatches of names and shapes are reported in one error, and nothing is written."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver), "taker": colocate.role(Taker, width=16)}, slots=1)
        giver, taker = group.role("giver", Giver), group.role("taker", Taker)
        before = taker.look()
        names = {"0.weight": "1.weight_", "1.weight": None}
        with pytest.raises(ConfigError, match="nothing was written") as caught:
            colocate.sync_weights(giver, taker, names=names)
        for text in (
            "has no 1.weight_; did you mean '1.weight'",
            "1.weight doesn't come",
            "0.bias is [8] float32 in giver and [16] float32 in ",
            "0.scale is [8]",
        ):
            assert text in str(caught.value)
        assert taker.look() == before
        with pytest.raises(ConfigError, match=r"giver has no weight 'wieght'"):
            colocate.sync_weights(giver, taker, names={"wieght": "weight"})

    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_extra_state_of_a_module(self, spawn: Spawn, as_tensor: bool) -> None:
        """A module's extra state is refused by name, with or without `check`; left out by name, the weights sync."""
        for left_out in (False, True):
            declared = colocate.role(Scaling, as_tensor=as_tensor, left_out=left_out)
            group = spawn({"source": declared, "target": colocate.role(Scaling, as_tensor=as_tensor, left_out=True)})
            source, target = group.role("source", Scaling), group.role("target", Scaling)
            for check in (False, True):
                if left_out:
                    colocate.sync_weights(source, target, check=check)
                else:
                    with pytest.raises(ColocateError, match=r"has '0\._extra_state' in its state, which is no weight"):
                        colocate.sync_weights(source, target, check=check)
            if left_out:
                assert_same_weights(source, target)
            group.close()

    @pytest.mark.parametrize("method", ["generate", "play"])
    @pytest.mark.parametrize("is_one", [True, False])
    @needs_feature("rows")
    def test_a_forgotten_sync(
        self, spawn: Spawn, runtime: colocate.Runtime, caplog: pytest.LogCaptureFixture, method: str, is_one: bool
    ) -> None:
        """Rows report how many source updates their weights are behind; beyond `staleness` there is one warning."""
        if is_one:
            group = other = spawn({"source": colocate.role(Learner), "target": colocate.role(Learner)})
        else:
            group, other = spawn({"source": colocate.role(Learner)}), spawn({"target": colocate.role(Learner)})
        source, target = group.role("source", Learner), other.role("target", Learner)

        def behind() -> int | None:
            getattr(target, method)([1, 2, 3])
            return Driver(runtime).take_weights_behind().get("weights_behind")

        source.update()
        assert behind() is None  # No sync yet.
        colocate.sync_weights(source, target, staleness=1)
        assert behind() == 0
        source.look()
        assert behind() == 0
        source.update(3)
        target.look()
        assert Driver(runtime).take_weights_behind() == {}
        assert behind() == 1
        colocate.sync_weights(source, target, staleness=1)
        assert behind() == 0
        words = "were computed with weights that are 2 updates"
        assert words not in caplog.text
        source.update()
        source.update()
        assert behind() == 2
        source.update()
        assert behind() == 3
        wait_until(lambda: words in caplog.text, "a warning")
        assert caplog.text.count("were computed with weights that are") == 1

    def test_a_target_that_takes_too_little(self, spawn: Spawn) -> None:
        """A `load_weights` with too few parameters is refused with the expected signature."""
        group = spawn({"giver": colocate.role(Giver), "taker": colocate.role(TakesNoVersion)}, slots=1)
        with pytest.raises(ConfigError, match=r"must be load_weights\(self, weights, version\).*too many"):
            colocate.sync_weights(group.role("giver", Giver), group.role("taker"))

    def test_names_and_dtype_of_weights(self, both: ColocatedGroup) -> None:
        """A tied weight may arrive under a single name, and values are rounded to the given dtype."""
        giver, taker = both.role("giver", Giver), both.role("taker", Taker)
        done = colocate.sync_weights(giver, taker, names={"1.weight": None}, dtype="bfloat16")
        assert done.nbytes == 2 * (8 * 8 + 8 + 8)
        assert _sum_weights(taker) == [pytest.approx(sums, rel=2e-2, abs=0.1) for sums in _sum_weights(giver)]
        assert _sum_weights(taker) != _sum_weights(giver)

    @needs_feature("memory")
    @pytest.mark.parametrize("role", ["giver", "taker"])
    @needs_feature("looking")
    def test_failed_sync_leaves_target_stale(self, both: ColocatedGroup, role: str) -> None:
        """A failure amid a sync leaves the target stale, also on ranks with all weights, until a complete sync."""
        giver, taker = both.role("giver", Giver), both.role("taker", Taker)
        colocate.sync_weights(giver, taker)
        both.role(role).fail(1, "raises")
        with pytest.raises(RoleError, match=r"the sync of giver to taker raised .*Failure on rank 1") as caught:
            colocate.sync_weights(giver, taker)
        assert isinstance(caught.value.__cause__, Failure)
        for _ in range(2):
            with pytest.raises(StaleWeightsError, match=r"a sync of giver to it has failed when \d of 4 had come"):
                taker.generate()
        wait_until(lambda: ", not in sync: a sync has failed since" in str(both.memory()), "the table says it")
        assert re.search(r"role taker rank 0/2 .*weights version 1, \d+ s old, not in sync: a sync", show_tree(both))
        assert giver.look()[0][1] == 0
        both.role(role).fail(1, None)
        assert colocate.sync_weights(giver, taker).version == 2
        assert taker.look() == [(sums, 2) for sums, _ in giver.look()]
        wait_until(lambda: "not in sync" not in show_tree(both), "it isn't")

    @pytest.mark.parametrize(
        ("role", "fault", "text"),
        [
            ("giver", "twice", "yields '0.weight' twice"),
            ("giver", "nothing", "yields nothing"),
            ("giver", "other", r"yields 0\.scale_ \[8\] float32 where 0\.scale \[8\] float32 came before"),
            ("giver", "other kind", r"named_weights of giver: '0\.weight' is ndarray, and no tensor"),
            ("giver", "again", "yields '0.weight' twice"),
            ("giver", "none", r"named_weights of giver gives NoneType: it yields \(name, tensor\)"),
            ("giver", "nan", "weight 0.scale of giver isn't finite"),
            ("taker", "keeps", "keeps tensors of giver"),
            ("taker", "writes", r"load_weights of taker writes into the tensor of 0\.weight, which isn't its own"),
            ("taker", "leaves", r"returned before it had taken all .* 1 of 4 had come, and 0\.bias is next"),
        ],
    )
    def test_sync_mistakes_have_distinct_errors(self, spawn: Spawn, role: str, fault: Any, text: str) -> None:
        """Each mistake of a role in a sync has its own error message."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver), "taker": colocate.role(Taker, seed=1)}, slots=1)
        giver, taker = group.role("giver", Giver), group.role("taker", Taker)
        if fault in ("other", "other kind", "again", "nan"):  # These faults need a first sync to deviate from.
            colocate.sync_weights(giver, taker)
        group.role(role).fail(0, fault)
        with pytest.raises((RoleError, ConfigError), match=text):
            colocate.sync_weights(giver, taker, finite=True)

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_strict_sync_reports_unnoticed_target_writes(self, elsewhere: bool) -> None:
        """With `strict=True` contents are compared: each write through `.data` and each kept tensor is reported."""
        pytest.importorskip("torch")
        roles: dict[str, Any] = {"giver": colocate.role(Giver), "taker": colocate.role(Taker, seed=1)}
        faults: dict[Fault, str] = {"writes aside": "writes into the tensor of 0", "keeps aside": "keeps tensors of"}
        with self.connect(strict=True) as runtime, runtime.reserve(slots=2) as pool:
            group = pool[:1].spawn(roles)
            other = pool[1:].spawn(roles) if elsewhere else group
            giver, taker = group.role("giver", Giver), other.role("taker", Taker)
            colocate.sync_weights(giver, taker)
            for fault, text in faults.items():
                taker.fail(0, fault)
                with pytest.raises(RoleError, match=rf"load_weights of .*taker {text}"):
                    colocate.sync_weights(giver, taker)
            taker.fail(0, None)
            assert colocate.sync_weights(giver, taker).version == 2

    def test_a_target_that_takes_nothing(self, spawn: Spawn) -> None:
        """A target that takes no weight fails the sync, and isn't stale."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver), "taker": colocate.role(Taker, seed=1)}, slots=1)
        giver, taker = group.role("giver", Giver), group.role("taker", Taker)
        taker.fail(0, "takes nothing")
        with pytest.raises(RoleError, match=r"returned before it had taken all .*: 0 of 4 had come"):
            colocate.sync_weights(giver, taker)
        assert taker.generate() == [0]

    @needs_feature("pipelines")
    def test_misuse_of_a_sync(self, both: ColocatedGroup, spawn: Spawn) -> None:
        """Wrong arguments of a sync are refused with a clear error."""
        giver, taker = both.role("giver", Giver), both.role("taker", Taker)
        with pytest.raises(ConfigError, match=r"source=.*it is a view"):
            colocate.sync_weights(Giver, taker)
        with pytest.raises(ConfigError, match=r"Taker \(role 'taker'\) has no method named_weights\(self\)"):
            colocate.sync_weights(taker, giver)
        with pytest.raises(ConfigError, match=r"dtype='float23'.*did you mean 'float32'"):
            colocate.sync_weights(giver, taker, dtype="float23")
        with pytest.raises(ConfigError, match=r"names=\['0.weight'\]\): it is a dict of names"):
            colocate.sync_weights(giver, taker, names=["0.weight"])  # type: ignore[arg-type]
        with both.pipeline(), pytest.raises(PipelineError):
            colocate.sync_weights(giver, taker)
        with self.connect() as other, other.reserve(slots=1) as pool:
            unsynced_taker = pool.spawn({"taker": colocate.role(Taker)}).role("taker", Taker)
            with pytest.raises(ColocateError, match="two runtimes"):
                colocate.sync_weights(giver, unsynced_taker)

    @needs(OwnProcess)
    def test_a_sync_of_memory_that_sleeps(self, both: ColocatedGroup) -> None:
        """A sync wakes only the tags that both methods declare."""
        giver, taker = both.role("giver", Giver), both.role("taker", Taker)
        for role in ("giver", "taker"):
            both.sleep(role)
        assert colocate.sync_weights(giver, taker).version == 1
        asleep = [role.asleep for slot in both.memory().slots for role in slot.roles]
        assert asleep == [1 << 20] * 4
        assert _sum_weights(taker) == _sum_weights(giver)

    @needs(OwnProcess)
    @pytest.mark.parametrize("role", ["giver", "taker"])
    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_a_sync_of_weights_that_no_module_has(self, spawn: Spawn, role: str, elsewhere: bool) -> None:
        """A method without `awake` finds all memory of the role awake; a weight that stays asleep is refused."""
        pytest.importorskip("torch")

        def both(giver: Any) -> tuple[ColocatedGroup, Any, Any]:
            taker = colocate.role(Plain)
            if not elsewhere:
                group = spawn({"giver": giver, "taker": taker}, slots=1)
                return group, group.role("giver"), group.role("taker")
            groups = {"giver": spawn({"giver": giver}, slots=1), "taker": spawn({"taker": taker}, slots=1)}
            return groups[role], groups["giver"].role("giver"), groups["taker"].role("taker")

        group, giver, taker = both(colocate.role(Plain, 1.0))
        group.sleep(role)
        assert colocate.sync_weights(giver, taker).version == 1
        assert taker.look() == [[1.0, 1.0]]
        group.sleep(role, ["cache"], on_call="fail")
        with pytest.raises(SleepingError, match=rf"role '{role}' sleeps|sleeping memory of its role \(cache\)"):
            colocate.sync_weights(giver, taker)
        if role == "giver":
            group, giver, taker = both(colocate.role(Declared))
            group.sleep(role)
            with pytest.raises(
                SleepingError, match=r"weight one of .*giver sleeps, and a sync doesn't wake it: say by"
            ):
                colocate.sync_weights(giver, taker)

    @needs(OwnProcess)
    @needs_feature("looking")
    def test_weights_after_a_restart_and_a_restore(self, spawn: Spawn, tmp_path: Path) -> None:
        """After a restore or restart weights are stale until a sync, whose version continues the count."""
        pytest.importorskip("torch")
        roles: dict[str, Any] = {"giver": colocate.role(Giver), "taker": colocate.role(Taker).on(weights="from sync")}
        group = spawn(roles, on_failure="restart")
        giver, taker = group.role("giver", Giver), group.role("taker", Taker)
        with pytest.raises(StaleWeightsError, match="from sync"):
            taker.generate()
        assert "no weights yet, not in sync: the role has no weights" in show_tree(group)
        assert colocate.sync_weights(giver, taker).version == 1
        group.checkpoint(tmp_path / "saved")
        group.restore(tmp_path / "saved")
        with pytest.raises(StaleWeightsError, match="was restored since from a checkpoint"):
            taker.generate()
        assert "not in sync: the group was restored from a checkpoint since" in show_tree(group)
        assert colocate.sync_weights(giver, taker).version == 2
        with pytest.raises(GroupRestarted):
            giver.restart(1)
        group.wait_ready(PATIENCE_S)
        with pytest.raises(StaleWeightsError, match="was restored since from a checkpoint"):
            taker.generate()
        assert colocate.sync_weights(giver, taker).version == 3
        assert taker.generate() == [3, 3]
        group.close()

    def test_weights_that_a_target_skips(self, spawn: Spawn) -> None:
        """Skipped weights count as received, and ranks on other slots receive the weights all the same."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver).on(slots=[1]), "taker": colocate.role(Taker, seed=1)})
        giver, taker = group.role("giver", Giver), group.role("taker", Taker)
        taker.fail(1, "skips")
        unsynced = _sum_weights(taker)[1]
        done = colocate.sync_weights(giver, taker)
        assert (done.version, done.by) == (1, ("shared", "peers"))
        assert taker.look() == [(_sum_weights(giver)[0], 1), (unsynced, 1)]

    def test_target_keeping_received_tensors_is_refused(self, spawn: Spawn) -> None:
        """A target on another slot that keeps received tensors is refused: other targets may read the same memory."""
        pytest.importorskip("torch")
        giver = spawn({"giver": colocate.role(Giver)}, slots=1).role("giver", Giver)
        taker = spawn({"taker": colocate.role(Taker, seed=1)}, slots=1).role("taker", Taker)
        taker.fail(0, "keeps")
        with pytest.raises(RoleError, match=r"load_weights of .*taker keeps tensors of .*giver that it was given"):
            colocate.sync_weights(giver, taker, bucket="300B")
        taker.fail(0, None)
        assert colocate.sync_weights(giver, taker).version == 1

    @needs(OwnProcess)
    def test_sharded_weights(self, spawn: Spawn) -> None:
        """Weights sharded by FSDP2 arrive whole, and a sharded target is refused."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver, sharded=True), "taker": colocate.role(Taker, seed=1)})
        giver, taker = group.role("giver", Giver), group.role("taker", Taker)
        giver.step()
        assert colocate.sync_weights(giver, taker).by == ("reference",)
        assert _sum_weights(taker) == _sum_weights(giver)
        giver.fail(1, "raises")
        with pytest.raises(RoleError, match=r"raised .*Failure on rank 1"):
            colocate.sync_weights(giver, taker)
        with pytest.raises(StaleWeightsError):
            taker.generate()
        giver.fail(1, None)
        assert colocate.sync_weights(giver, taker).version == 2
        alone = spawn({"giver": colocate.role(Giver, sharded=True), "sharer": colocate.role(Sharer)}, slots=1)
        assert colocate.sync_weights(alone.role("giver"), alone.role("sharer")).by == ("shared",)
        for width in (7, 1):  # the last rank has fewer rows, or none
            odd = spawn({"giver": colocate.role(Giver, width, sharded=True)}).role("giver", Giver)
            names = ["0.weight", "0.bias", "0.scale", "1.weight"]
            assert odd.as_torch_gathers() == [[(name, True) for name in names]] * 2
        sharded = spawn({"giver": colocate.role(Giver), "taker": colocate.role(Taker, sharded=True)})
        giver, taker = sharded.role("giver", Giver), sharded.role("taker", Taker)
        with pytest.raises(ConfigError, match=r"is sharded \(0\.weight and 2 more\) and takes no whole weights"):
            colocate.sync_weights(giver, taker)
        assert taker.generate() == [0, 0]


class WeightSyncsBetween(ExecutorCase):
    """Syncs to a role on other slots, or in another group."""

    @mark_executor_part
    @pytest.mark.parametrize("slots", [1, 3])
    def test_weights_between_groups(self, spawn: Spawn, slots: int) -> None:
        """Weights of two source ranks reach one or three target ranks, with any bucket size."""
        pytest.importorskip("torch")
        giver = spawn({"giver": colocate.role(Giver, width=400)}).role("giver", Giver)
        taker = spawn({"taker": colocate.role(Taker, 400, seed=1)}, slots=slots).role("taker", Taker)
        for version, bucket in enumerate(("256MiB", "1KiB"), 1):
            giver.step()
            done = colocate.sync_weights(giver, taker, bucket=bucket)
            assert (done.version, done.by) == (version, ("peers",))
            assert taker.look() == [(giver.look()[0][0], version)] * slots

    def test_a_target_that_buffers(self, spawn: Spawn) -> None:
        """A target may buffer a whole sync; a source that writes into a yielded tensor is refused."""
        pytest.importorskip("torch")
        giver = spawn({"giver": colocate.role(Giver, width=400)}, slots=1).role("giver", Giver)
        group = spawn({"taker": colocate.role(Taker, 400, seed=1)}, slots=1)
        taker = group.role("taker", Taker)
        taker.fail(0, "buffers")
        for version in (1, 2):
            giver.step()
            colocate.sync_weights(giver, taker, bucket="1B")
            assert taker.look() == [(giver.look()[0][0], version)]
        giver.fail(0, "scratch")
        with pytest.raises(RoleError, match=r"named_weights of group-\d+\.giver writes into a tensor"):
            colocate.sync_weights(giver, taker)

    @mark_executor_part
    @needs(OwnProcess)
    def test_transport_files_do_not_accumulate(self, spawn: Spawn) -> None:
        """However a sync ends, the target has no transport file mapped, and the source's files don't accumulate.

        No target may write into memory that several targets read.
        """
        pytest.importorskip("torch")
        giver = spawn({"giver": colocate.role(Giver, width=400)}, slots=1).role("giver", Giver)
        taker = spawn({"taker": colocate.role(Taker, 400, seed=1)}).role("taker", Taker)
        before = giver.mapped()

        def sync(timeout: float | None = None) -> None:
            colocate.sync_weights(giver, taker, bucket="1B", timeout=timeout)

        for _ in range(2):
            sync()
            assert taker.mapped() == [0, 0]
            assert giver.mapped()[0] - before[0] <= 3
        taker.fail(1, "writes")
        with pytest.raises(RoleError, match=r"taker writes into the tensor of 0\.weight"):
            sync()
        taker.fail(1, None)
        assert taker.mapped() == [0, 0]
        with Gate() as gate:
            taker.stop_at(gate.address)
            with pytest.raises(CallTimeout):
                sync(0.5)
        taker.stop_at(None)
        assert taker.mapped() == [0, 0]
        assert giver.mapped() == before
        with pytest.raises(StaleWeightsError, match="had come"):
            taker.generate()
        sync()
        assert _sum_weights(taker) == _sum_weights(giver) * 2

    @needs(OwnProcess)
    def test_weights_are_written_once_per_machine(self, spawn: Spawn) -> None:
        """Within a machine one source rank writes the weights once for all targets."""
        pytest.importorskip("torch")
        giver = spawn({"giver": colocate.role(Giver, width=400)}).role("giver", Giver)
        taker = spawn({"taker": colocate.role(Taker, 400, seed=1)}, slots=3).role("taker", Taker)
        before = giver.mapped()
        colocate.sync_weights(giver, taker)
        first, second = giver.mapped()
        assert (first > before[0], second) == (True, before[1])
        assert _sum_weights(taker) == _sum_weights(giver)[:1] * 3

    def test_sync_between_groups_is_ordered_at_once(self, spawn: Spawn) -> None:
        """A submitted sync between groups takes its place in both call orders at once, even if the timers are late."""
        pytest.importorskip("torch")
        one = spawn({"giver": colocate.role(Giver)}, slots=1)
        other = spawn({"taker": colocate.role(Taker)}, slots=1)
        giver, taker = one.role("giver", Giver), other.role("taker", Taker)
        later = threading.Event()
        one._node.services.timers.call_soon(lambda: later.wait(PATIENCE_S))
        sync = colocate.sync_weights.submit(giver, taker)
        after = taker.generate.submit()
        later.set()
        assert sync.result(PATIENCE_S).version == 1
        assert after.result(PATIENCE_S) == [1]

    def test_weights_between_slots_of_a_group(self, spawn: Spawn) -> None:
        """A target rank beside the source gets weights by reference, and ranks on other slots get copies."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver).on(slots=[1]), "taker": colocate.role(Taker, seed=1)})
        giver, taker = group.role("giver", Giver), group.role("taker", Taker)
        assert colocate.sync_weights(giver, taker).by == ("reference", "peers")
        assert _sum_weights(taker) == _sum_weights(giver) * 2
        sharer = spawn({"taker": colocate.role(Sharer)}, slots=1).role("taker", Sharer)
        with pytest.raises(ConfigError, match=r"isn't in the same worker"):
            colocate.sync_weights(giver, sharer)

    @needs(OwnProcess)
    def test_ranks_that_wait_for_each_other_in_a_sync(self, spawn: Spawn) -> None:
        """Ranks that meet in a collective at each weight don't block a sync, on either side.

        If only one rank of the source has named the weights, both ranks are asked again.
        """
        group = spawn({"giver": colocate.role(Giver).on(slots=[1]), "taker": colocate.role(Taker, seed=1)})
        giver, taker = group.role("giver", Giver), group.role("taker", Taker)
        for rank in range(2):
            taker.fail(rank, "waits")
        colocate.sync_weights(giver, taker, bucket="1B")
        assert _sum_weights(taker) == _sum_weights(giver) * 2
        both = spawn({"giver": colocate.role(Giver), "taker": colocate.role(Taker, seed=1)})
        giver, taker = both.role("giver", Giver), both.role("taker", Taker)
        giver.fail(0, "waits")
        giver.fail(1, "ends badly")
        with pytest.raises(RoleError, match=r"Failure on rank 1 of .*: behind the weights"):
            colocate.sync_weights(giver, taker)
        assert colocate.sync_weights(giver, taker).version == 1
        assert _sum_weights(taker) == _sum_weights(giver)

    @mark_executor_part
    @pytest.mark.parametrize("role", ["giver", "taker"])
    def test_a_failure_in_either_group_of_a_sync(self, spawn: Spawn, role: str) -> None:
        """A failure on either side fails a sync between groups, and both groups can sync again, also internally."""
        pytest.importorskip("torch")
        groups = {
            "giver": spawn({"giver": colocate.role(Giver, width=64)}),
            "taker": spawn({"own": colocate.role(Giver, 64, seed=2), "taker": colocate.role(Taker, 64, seed=1)}),
        }
        giver, taker = groups["giver"].role("giver", Giver), groups["taker"].role("taker", Taker)
        colocate.sync_weights(giver, taker)
        groups[role].role(role).fail(0, "raises")
        with pytest.raises(RoleError, match=r"raised .*Failure on rank 0"):
            colocate.sync_weights(giver, taker, bucket="1B")
        groups[role].role(role).fail(0, None)
        with pytest.raises(StaleWeightsError):
            taker.generate()
        own_giver = groups["taker"].role("own", Giver)
        for version, source in ((2, own_giver), (3, giver)):
            assert colocate.sync_weights(source, taker).version == version
            assert taker.look() == [(source.look()[0][0], version)] * 2

    @mark_executor_part
    @needs(OwnProcess)
    @pytest.mark.parametrize("role", ["giver", "taker"])
    def test_a_death_in_either_group_of_a_sync(self, spawn: Spawn, role: str) -> None:
        """A death on either side fails the sync, and the other group stays usable."""
        pytest.importorskip("torch")
        groups = {
            "giver": spawn({"giver": colocate.role(Giver)}, slots=1),
            "taker": spawn({"taker": colocate.role(Taker, seed=1)}, slots=1),
        }
        giver, taker = groups["giver"].role("giver", Giver), groups["taker"].role("taker", Taker)
        with Gate() as gate:
            first = giver.step.submit(gate.address)
            dies = groups[role].role(role).restart.submit(0)
            sync = colocate.sync_weights.submit(giver, taker)
        first.exception(PATIENCE_S)
        assert isinstance(dies.exception(PATIENCE_S), WorkerDied)
        error = sync.exception(PATIENCE_S)  # On a busy machine the death may be reported after the consequence.
        assert isinstance(error, WorkerDied) or "giver doesn't give its weights to the end" in str(error)
        other = "taker" if role == "giver" else "giver"
        assert groups[other].role(other).look()[0][1] == 0

    def test_syncs_both_ways_at_once(self, spawn: Spawn) -> None:
        """Syncs from each of two groups to the other take one order in both."""
        pytest.importorskip("torch")
        roles: dict[str, Any] = {"giver": colocate.role(Giver), "taker": colocate.role(Taker)}
        one, other = spawn(roles, slots=1), spawn(roles, slots=1)
        calls = [
            colocate.sync_weights.submit(source.role("giver", Giver), target.role("taker", Taker))
            for _ in range(8)
            for source, target in ((one, other), (other, one))
        ]
        assert [call.result(PATIENCE_S).version for call in calls] == [1 + number // 2 for number in range(16)]

    def test_background(self, spawn: Spawn) -> None:
        """A target that shares tensors can't be a background role: both lanes would use the same memory."""
        pytest.importorskip("torch")
        roles: dict[str, Any] = {"giver": colocate.role(Giver), "taker": colocate.role(Sharer).on(background=True)}
        group = spawn(roles, slots=1)
        with pytest.raises(ConfigError, match=r"shares=True\), and 'taker' is a background role"):
            colocate.sync_weights(group.role("giver"), group.role("taker"))


_BITS = r"0\.weight has other bits; 1\.weight has other bits"


class WeightChecks(ExecutorCase):
    """Checks and comparisons of weights at both ends of a sync."""

    @pytest.fixture
    def checking(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn a source, and a target that yields its weights back, on two slots."""
        pytest.importorskip("torch")
        return spawn({"giver": colocate.role(Giver), "taker": colocate.role(Checked, seed=1)})

    def test_weights_that_are_checked(self, checking: ColocatedGroup) -> None:
        """`check=True` compares all weights at each sync; without `check` none is compared."""
        giver, taker = checking.role("giver", Giver), checking.role("taker", Checked)
        for _ in range(2):
            assert colocate.sync_weights(giver, taker, check=True).checked == 4
            giver.step()
        assert colocate.sync_weights(giver, taker).checked is None

    @pytest.mark.parametrize(
        ("fault", "says", "names"),
        [
            (
                "stale",
                r"1 of 4 weights of taker on rank 1 .*of giver after the sync: 0\.bias has other bits$",
                "0.bias",
            ),
            ("bit", f"2 of 4 .*: {_BITS}$", "0.weight 1.weight"),
            ("swaps", r"2 of 4 .*: 0\.bias has other bits; 0\.scale has other bits$", "0.bias 0.scale"),
            ("sign", f"2 of 4 .*: {_BITS}$", "0.weight 1.weight"),
            ("hides", r"1 of 4 .*: 0\.bias isn't among those that it gives back$", "0.bias"),
            ("adds", r"1 of 5 .*: 2\.bias hasn't come$", "2.bias"),
        ],
    )
    def test_weights_that_differ(self, checking: ColocatedGroup, fault: Fault, says: str, names: str) -> None:
        """Different weights raise only with `check`, and leave the target stale until a complete sync."""
        giver, taker = checking.role("giver", Giver), checking.role("taker", Checked)
        taker.fail(1, fault)
        colocate.sync_weights(giver, taker)
        taker.generate()
        with pytest.raises(WeightsDifferError, match=says) as caught:
            colocate.sync_weights(giver, taker, check=True)
        assert (caught.value.names, caught.value.rank) == ((*names.split(),), 1)
        with pytest.raises(StaleWeightsError, match="a sync of giver to it has failed when 4 of 4 had come"):
            taker.generate()
        taker.fail(1, None)
        assert colocate.sync_weights(giver, taker, check=True).version == 2

    @mark_executor_part
    def test_weights_that_differ_between_groups(self, spawn: Spawn) -> None:
        """A check compares received with sent bits, and stored with received weights, of any dtype."""
        pytest.importorskip("torch")
        giver = spawn({"giver": colocate.role(Giver)}).role("giver", Giver)
        roles: dict[str, Any] = {
            "taker": colocate.role(Checked, seed=1),
            "half": colocate.role(Checked, dtype="bfloat16"),
            "small": colocate.role(Checked, dtype="float8_e4m3fn"),
        }
        group = spawn(roles, slots=2)
        taker, half = group.role("taker", Checked), group.role("half", Checked)
        for target in (taker, half, group.role("small", Checked)):
            assert colocate.sync_weights(giver, target, check=True).checked == 4
        taker.fail(1, "bit")
        with pytest.raises(WeightsDifferError, match=f"taker on rank 1 .*{_BITS}"):
            colocate.sync_weights(giver, taker, check=True)
        half.fail(0, "stale")
        giver.step()
        with pytest.raises(WeightsDifferError, match=r"half on rank 0 .*0\.bias has other bits"):
            colocate.sync_weights(giver, half, check=True)
        half.fail(0, None)
        giver.fail(0, "writes late")
        giver.fail(1, "writes late")
        with pytest.raises(WeightsDifferError, match=r": 0\.bias has come with other bits than were sent"):
            colocate.sync_weights(giver, half, check=True)

    @needs(OwnProcess)
    def test_the_check_of_one_shard(self, spawn: Spawn) -> None:
        """A wrong part on one rank of a tensor-parallel target is found by the check."""
        pytest.importorskip("torch")
        group = spawn({"giver": colocate.role(Giver, sharded=True), "taker": colocate.role(Halves)})
        giver, taker = group.role("giver", Giver), group.role("taker", Halves)
        assert colocate.sync_weights(giver, taker, check=True).checked == 4
        assert colocate.compare_weights(giver, taker).same
        giver.step()
        taker.fail(1, "shard")
        with pytest.raises(WeightsDifferError, match=r"1 of 4 .*: 0\.bias has other bits"):
            colocate.sync_weights(giver, taker, check=True)

    def test_ranks_of_a_source_that_differ(self, checking: ColocatedGroup) -> None:
        """Source ranks with different weights fail the check, though each target rank has its source rank's weights."""
        giver, taker = checking.role("giver", Giver), checking.role("taker", Checked)
        giver.fail(1, "drifts")
        giver.step()
        colocate.sync_weights(giver, taker)
        words = r"2 of 4 weights that rank 1 of taker has from giver aren't those that rank 0 has: .*: 0\.weight; 1\."
        with pytest.raises(WeightsDifferError, match=words):
            colocate.sync_weights(giver, taker, check=True)
        with pytest.raises(StaleWeightsError):
            taker.generate()

    def test_a_check_that_can_say_nothing(self, checking: ColocatedGroup, spawn: Spawn) -> None:
        """A check of a target without `named_weights` is refused before anything is written, with advice."""
        giver = checking.role("giver", Giver)
        other = spawn({"taker": colocate.role(Taker)}, slots=1).role("taker", Taker)
        words = r"no method named_weights\(self\).*What it yields is compared .*colocate\.torch\.named_weights"
        with pytest.raises(ConfigError, match=rf"sync_weights\(check=True\): Taker \(role 'taker'\) has {words}"):
            colocate.sync_weights(giver, other, check=True)
        with pytest.raises(ConfigError, match=r"compare_weights: Taker \(role 'taker'\) has no method named_weights"):
            colocate.compare_weights(giver, other)
        assert other.look()[0][1] == 0

    def test_weights_of_two_roles(self, checking: ColocatedGroup, spawn: Spawn) -> None:
        """`compare_weights` compares weights as a sync would load them, on all ranks of both roles."""
        giver, taker = checking.role("giver", Giver), checking.role("taker", Checked)
        half = spawn({"half": colocate.role(Checked, dtype="bfloat16")}, slots=1).role("half", Checked)
        comparison = colocate.compare_weights(giver, taker)
        assert [row["name"] for row in comparison.differing] == ["0.weight", "0.bias", "1.weight"]
        with pytest.raises(AssertionError, match=r"(?s)3 of 4 weights of .*0\.bias +\[8\] float32"):
            assert_same_weights(giver, taker)
        for role in (taker, half):
            colocate.sync_weights(giver, role)
            assert_same_weights(giver, role)
        taker.fail(1, "bit")
        colocate.sync_weights(giver, taker)
        comparison = colocate.compare_weights(giver, taker)
        assert [(row["name"], row["differs"]) for row in comparison.differing] == [
            ("0.weight", "on rank 1 of b"),
            ("1.weight", "on rank 1 of b"),
        ]
        assert {row["differs"] for row in colocate.compare_weights(taker, taker).differing} == {"on rank 1 of a"}
        taker.fail(0, "hides")
        taker.fail(1, "hides")
        comparison = colocate.compare_weights(giver, taker, names={"0.scale": None})
        assert [(row["name"], row["differs"]) for row in comparison.differing if "bias" in row["name"]] == [
            ("0.bias", "only in a")
        ]
        assert ("0.scale", "only in b") in [(row["name"], row["differs"]) for row in comparison.rows]
        with pytest.raises(TypeError, match=r"neither true nor false"):
            bool(comparison)
        with pytest.raises(ConfigError, match=r"giver has no weight '0\.scal'; did you mean '0\.scale'"):
            colocate.compare_weights(giver, taker, names={"0.scal": None})


AREAS = [WeightSyncs, WeightSyncsBetween, WeightChecks]
