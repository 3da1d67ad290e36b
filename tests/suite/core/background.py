"""Background roles: their calls run in an order of their own, concurrently with other roles' calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.suite.marks import mark_executor_part
from tests.suite.probes.background import Beside

import colocate
from colocate import ColocatedGroup, MemoryBudgetError
from colocate.errors import CallTimeout, CapabilityError, RoleError, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.waiting import PATIENCE_S

BACKGROUND = colocate.role(Beside).on(background=True)


class Background(ExecutorCase):
    """A background role beside an ordinary one."""

    @pytest.fixture
    def two_lanes(self, spawn: Spawn) -> ColocatedGroup:
        """Spawn a group with an ordinary and a background role on two slots."""
        return spawn({"train": colocate.role(Beside), "roll": BACKGROUND})

    @mark_executor_part
    def test_lanes(self, two_lanes: ColocatedGroup) -> None:
        """Each role's calls run in order on the role's own thread, and don't wait for the other role's calls."""
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        with Gate() as gate, Gate() as other:
            first, second = roll.do.submit("first", gate.address), roll.do.submit("second")
            gate.wait_for(2)
            threads = {name for name, _ in train.do("beside")}
            assert not first.done()
            assert not second.done()
            blocked = train.do.submit("blocked", other.address)
            other.wait_for(2)
            gate.open()
            assert first.result(PATIENCE_S) == (generations := second.result(PATIENCE_S))
            assert threads.isdisjoint(name for name, _ in generations)
            assert roll.read() == [["first", "second"]] * 2
            assert not blocked.done()
        assert blocked.result(PATIENCE_S)
        assert train.read() == [["beside", "blocked"]] * 2

    @mark_executor_part
    def test_failure_stays_in_one_lane(self, two_lanes: ColocatedGroup) -> None:
        """A failed or late call on one lane neither ends the other lane's running call nor waits for its end."""
        for name, other_name in (("train", "roll"), ("roll", "train")):
            role, other = two_lanes.role(name, Beside), two_lanes.role(other_name, Beside)
            with Gate() as gate, Gate() as late:
                goes_on = other.do.submit("goes on", gate.address)
                gate.wait_for(2)
                with pytest.raises(RoleError, match="Boom on rank 1"):
                    role.do("fails", fails=1)
                slow = role.do.options(timeout=0.2).submit("late", late.address)
                with pytest.raises(CallTimeout, match=f"{name}.do"):
                    slow.result(PATIENCE_S)
                late.open()
                assert len(role.do("after")) == 2
                assert not goes_on.done()
                gate.open()
                assert len(goes_on.result(PATIENCE_S)) == 2

    @needs_feature("weights")
    @needs_feature("checkpoints")
    def test_sync_and_restore_span_all_roles(self, two_lanes: ColocatedGroup, tmp_path: Path) -> None:
        """A sync runs between all roles' earlier and later calls; a restore drops calls after a checkpoint."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        for version in (1, 2):
            with Gate() as gate:
                before = roll.do.submit("before", gate.address)
                gate.wait_for(2)
                sync = colocate.sync_weights.submit(train, roll)
                after, behind = roll.do.submit("after"), train.do.submit("behind")
                assert not sync.done()
            assert sync.result(PATIENCE_S).version == version
            assert [generation for _, generation in before.result(PATIENCE_S)] == [version - 1] * 2
            assert [generation for _, generation in after.result(PATIENCE_S)] == [version] * 2
            assert len(behind.result(PATIENCE_S)) == 2
        two_lanes.checkpoint(tmp_path / "saved")
        roll.do("forgotten")
        two_lanes.restore(tmp_path / "saved")
        colocate.sync_weights(train, roll)
        assert roll.read() == [["before", "after"] * 2] * 2

    @needs_feature("weights")
    def test_a_sync_that_is_given_up(self, two_lanes: ColocatedGroup) -> None:
        """A sync that times out behind a background call is given up: both lanes work on, and a later sync succeeds."""
        pytest.importorskip("torch")
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        with Gate() as gate:
            before = roll.do.submit("before", gate.address)
            gate.wait_for(2)
            with pytest.raises(CallTimeout, match="the sync of train to roll"):
                colocate.sync_weights(train, roll, timeout=0.2)
            assert len(train.do("goes on")) == 2
            after = roll.do.submit("after")
            assert not before.done()
        assert [generation for _, generation in after.result(PATIENCE_S)] == [0, 0]
        with pytest.raises(RoleError, match="Boom on rank 0"):
            train.do("fails", fails=0)
        assert colocate.sync_weights(train, roll).version == 1

    @needs_feature("pipelines")
    def test_residents(self, two_lanes: ColocatedGroup) -> None:
        """A call waits for a resident that the other lane makes, and fails if the making call fails."""
        train, roll = two_lanes.role("train", Beside), two_lanes.role("roll", Beside)
        with Gate() as gate:
            resident = roll.give.keep([1, 2], gate.address)
            used = train.give.submit(resident.ref)
            gate.wait_for(2)
            assert not used.done()
        assert used.result(PATIENCE_S) == [[[1, 2], [1, 2]]] * 2
        assert roll.give(train.give.keep("back").ref) == [["back", "back"]] * 2
        with Gate() as gate:
            failed = roll.do.keep("gone", gate.address, fails=1)
            gate.wait_for(2)
            poisoned = train.give.submit(failed.ref)
        with pytest.raises(RoleError, match="Boom"):
            poisoned.result(PATIENCE_S)
        with two_lanes.pipeline():
            both = train.give.submit(roll.give.keep(3).ref)
        assert both.result(PATIENCE_S) == [[3, 3]] * 2

    def test_write_error_names_concurrent_calls(self, spawn: Spawn) -> None:
        """An error about a write into a resident names both calls if two calls ran at the same time."""
        torch = pytest.importorskip("torch")
        group = spawn({"train": colocate.role(Beside), "roll": BACKGROUND}, slots=1)
        train, roll = group.role("train", Beside), group.role("roll", Beside)
        with Gate() as gate, Gate() as late:
            resident = roll.give.keep(torch.ones(2))
            used = train.give.submit(resident.ref, gate.address)
            gate.wait_for()
            written = roll.scribble.submit(resident.ref, late.address)
            late.wait_for()
            gate.open()
            with pytest.raises(RoleError, match=r"roll\.scribble or train\.give changed in place .* roll\.give had"):
                used.result(PATIENCE_S)
        assert written.result(PATIENCE_S) == [None]
        resident = roll.give.keep(torch.ones(2))
        with Gate() as gate:
            gate.open()
            with pytest.raises(RoleError, match=r"^roll\.scribble changed in place"):
                roll.scribble(resident.ref, gate.address)

    def test_cancelling(self, two_lanes: ColocatedGroup) -> None:
        """Cancelling withdraws a queued background call, and leaves a running one to its end."""
        roll = two_lanes.role("roll", Beside)
        with Gate() as gate:
            running = roll.do.submit("running", gate.address)
            queued = roll.do.submit("queued")
            gate.wait_for(2)
            assert queued.cancel()
            assert not running.cancel()
        assert running.result(PATIENCE_S)
        assert roll.read() == [["running"]] * 2

    @pytest.mark.parametrize(
        ("what", "why"),
        [
            ("alarm", "signal only works in main thread(.|\n)*background role has a thread of its own"),
            ("train", "'roll' is a background role of group"),
        ],
    )
    def test_background_role_limits_are_explained(self, two_lanes: ColocatedGroup, what: str, why: str) -> None:
        """A background role has no signal handlers, siblings or process groups, and each error says why."""
        with pytest.raises(RoleError, match=why):
            two_lanes.role("roll", Beside).ask(what)
        with pytest.raises(RoleError, match="'roll' is a background role of group"):
            two_lanes.role("train", Beside).ask("roll")
        pytest.importorskip("torch")
        with pytest.raises(CapabilityError, match=r"'roll' .* is a background role, and has no process groups"):
            two_lanes.role("roll", Beside).ask("group")

    @needs(OwnProcess)
    def test_background_role_timers_are_refused(self, two_lanes: ColocatedGroup) -> None:
        """A background role can't set a timer, whose signal would interrupt another role's call."""
        with pytest.raises(RoleError, match=r"signal only works in main thread(.|\n)*background role has a thread"):
            two_lanes.role("roll", Beside).ask("timer")

    @needs_feature("memory")
    def test_budgets(self, spawn: Spawn) -> None:
        """A background role has a memory budget, and `group.memory()` includes the role while its call runs."""
        pytest.importorskip("torch")
        roles = {"train": colocate.role(Beside), "roll": BACKGROUND.on(device_memory="4KiB")}
        group = spawn(roles, slots=1)
        roll = group.role("roll", Beside)
        with Gate() as gate:
            running = roll.do.submit("running", gate.address)
            gate.wait_for()
            assert {role.role for slot in group.memory().slots for role in slot.roles} >= {"roll"}
        running.result(PATIENCE_S)
        with pytest.raises(MemoryBudgetError, match="role 'roll'"):
            roll.hold(1 << 13)

    @mark_executor_part
    def test_closing(self, spawn: Spawn, tmp_path: Path) -> None:
        """Closing ends a running background call, and calls each lane's `close` on a thread of its own."""
        roles = {"train": colocate.role(Beside, str(tmp_path)), "roll": colocate.role(Beside, str(tmp_path))}
        group = spawn({**roles, "roll": roles["roll"].on(background=True)})
        roll = group.role("roll", Beside)
        with Gate() as gate:
            running = roll.generate.submit(gate.address)
            gate.wait_for(2)
            group.close()
        assert len(running.result(PATIENCE_S)) == 2  # A call that ends within the grace has a result.
        outputs = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert sorted(outputs) == ["roll-0", "roll-1", "train-0", "train-1"]
        assert outputs["roll-0"] != outputs["train-0"]

    @mark_executor_part
    @needs(OwnProcess)
    def test_death_and_restart(self, spawn: Spawn) -> None:
        """A worker's death in a background call fails both lanes' calls, and both lanes run again after the restart."""
        group = spawn({"train": colocate.role(Beside), "roll": BACKGROUND}, on_failure="restart")
        train, roll = group.role("train", Beside), group.role("roll", Beside)
        with Gate() as gate:
            blocked = train.do.submit("blocked", gate.address)
            gate.wait_for(2)
            with pytest.raises(WorkerDied, match=r"while it ran train\.do and roll\.end"):
                roll.end.options(ranks=[1])()
            with pytest.raises(WorkerDied):
                blocked.result(PATIENCE_S)
        group.wait_ready(PATIENCE_S)
        with Gate() as gate:
            running = roll.do.submit("running", gate.address)
            gate.wait_for(2)
            assert len(train.do("beside")) == 2
            assert not running.done()
        assert len(running.result(PATIENCE_S)) == 2
