"""Groups that are restarted: together, from their last checkpoint, a bounded number of times."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate.errors import ClosedError, ColocateError, GroupRestarted, RoleError, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, of_executor
from colocate.testing.gate import Gate
from colocate.testing.probes.lasting import Drawing, Lasting, Passing
from colocate.testing.probes.plain import Log
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, wait_until


class States:
    """An observer that notes a group's states."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.seen: list[str] = []
        self.causes: list[ColocateError] = []

    def colocate_group_changed(self, name: str, state: str, cause: ColocateError | None) -> None:
        """Note one."""
        if name != self.group:
            return
        self.seen.append(state)
        if cause is not None:
            self.causes.append(cause)


def killed(group: ColocatedGroup, rank: int = 0) -> GroupRestarted:
    """What is told when a rank is killed in a call."""
    with pytest.raises(GroupRestarted) as caught:
        group.role("lasting", Lasting).kill(rank)
    return caught.value


class Restarting(ExecutorCase):
    """`on_failure="restart"`, `group.wait_ready`."""

    @pytest.fixture
    def lasting(self, spawn: Spawn) -> Callable[..., ColocatedGroup]:
        """Makes a group that is restarted."""

        def make(slots: int = 2, restarts: int = 3, more: dict[str, RoleSpec[Any]] | None = None, **given: Any) -> Any:
            roles = {"lasting": colocate.role(Lasting, **given), **(more or {})}
            return spawn(roles, slots=slots, on_failure="restart", restarts=restarts)

        return make

    @needs(OwnProcess)
    @of_executor
    def test_it_goes_on_from_its_checkpoint(self, lasting: Callable[..., ColocatedGroup], tmp_path: Path) -> None:
        """Roles are as the last checkpoint has them, on new workers; one that can't be saved is as constructed."""
        group = lasting(more={"passing": colocate.role(Passing)})
        role, passing = group.role("lasting", Lasting), group.role("passing", Passing)
        assert group.wait_ready() is None
        role.add()
        passing.add()
        group.checkpoint(tmp_path / "first")
        role.add()
        group.checkpoint(tmp_path / "second", tag=2)
        role.add()
        before = role.tell()
        error = killed(group, rank=1)
        assert (error.rank, error.signal, error.pid) == (1, "SIGKILL", before[1][2])
        assert group.wait_ready(PATIENCE_S) == 2
        after = role.tell()
        assert [(count, generation) for count, generation, _ in after] == [(2, 1), (2, 1)]
        assert not {pid for _, _, pid in before} & {pid for _, _, pid in after}
        assert passing.add() == [1, 1]
        assert (group.state, group.generation) == ("ready", 1)
        group.close()

    @needs(OwnProcess)
    def test_without_a_checkpoint(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """Roles are as constructed."""
        group = lasting()
        group.role("lasting", Lasting).add(5)
        killed(group)
        assert group.wait_ready(PATIENCE_S) is None
        assert group.role("lasting", Lasting).add() == [1, 1]

    @needs(OwnProcess)
    def test_what_was_pending_is_told_once(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """Calls and residents of the old generation fail with one GroupRestarted, whose cause is what happened."""
        group = lasting()
        role = group.role("lasting", Lasting)
        kept = role.counted.keep([1, 2])
        kept.fetch()
        with Gate() as gate:
            calls = [role.wait.submit(gate.address), role.kill.submit(), role.add.submit()]
            queued = role.counted.keep([3, 4])
        errors = [call.exception(PATIENCE_S) for call in calls[1:]]
        assert errors[0] == errors[1]
        assert isinstance(errors[0], GroupRestarted)
        assert isinstance(errors[0], WorkerDied)
        assert isinstance(errors[0].__cause__, WorkerDied)
        assert "wait_ready" in str(errors[0])
        group.wait_ready(PATIENCE_S)
        for lost in (kept, queued):
            for use in (lost.fetch, lambda lost=lost: lost.spec, lambda lost=lost: role.counted(lost.ref)):
                with pytest.raises(GroupRestarted):
                    use()
        del kept, queued, lost, use
        assert role.counted([1, 2]) == [1, 2]
        group.close()  # everything has been told

    @needs(OwnProcess)
    def test_calls_are_refused_until_somebody_has_asked(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """Nobody goes on with restored roles by accident."""
        group = lasting()
        role = group.role("lasting", Lasting)
        killed(group)
        wait_until(lambda: group.state == "ready", "the group is there again")
        for call in (role.add, role.add.submit, role.add.keep, lambda: group.run(lambda ctx: None)):
            with pytest.raises(GroupRestarted):
                call()
        with pytest.raises(GroupRestarted), group.pipeline():
            role.add.submit()
        group.wait_ready()
        assert role.add() == [1, 1]

    @needs(OwnProcess)
    def test_states(self, runtime: Runtime, spawn: Spawn) -> None:
        """Observers hear of each state, and of what made the group fail."""
        states = States("observed")
        runtime.observe(states)
        group = spawn({"lasting": colocate.role(Lasting)}, name="observed", on_failure="restart")
        killed(group)
        group.wait_ready(PATIENCE_S)
        group.close()
        wait_until(lambda: states.seen[-1:] == ["closed"], "the last state was told")
        assert states.seen == ["starting", "ready", "failed", "restarting", "ready", "closing", "closed"]
        assert [type(cause) for cause in states.causes] == [WorkerDied]

    @needs(OwnProcess)
    def test_it_is_tried_a_bounded_number_of_times(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """A group that doesn't come back fails for good with the first cause; the reason is with it."""
        group = lasting(restarts=2, breaks=9)
        error = killed(group)
        with pytest.raises(WorkerDied) as caught:
            group.wait_ready(PATIENCE_S)
        assert caught.value == error.__cause__
        assert not isinstance(caught.value, GroupRestarted)
        assert "doesn't come back in generation 2" in caught.value.__notes__[0]
        assert (group.state, group.generation) == ("failed", 2)
        with pytest.raises(WorkerDied) as again:
            group.role("lasting", Lasting).add()
        assert again.value == caught.value
        group.close()

    @needs(OwnProcess)
    def test_it_is_tried_again(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """One attempt that fails isn't the end."""
        group = lasting(restarts=3, breaks=1)
        killed(group)
        group.wait_ready(PATIENCE_S)
        assert [generation for _, generation, _ in group.role("lasting", Lasting).tell()] == [2, 2]

    @needs(OwnProcess)
    def test_a_checkpoint_begins_the_count_anew(self, lasting: Callable[..., ColocatedGroup], tmp_path: Path) -> None:
        """What is bounded is the number of restarts without progress."""
        group = lasting(slots=1, restarts=1)
        for number in range(3):
            group.checkpoint(tmp_path / "same", tag=number)
            killed(group)
            assert group.wait_ready(PATIENCE_S) == number
        killed_for_good = group.role("lasting", Lasting).kill.submit().exception(PATIENCE_S)
        assert isinstance(killed_for_good, WorkerDied)
        assert not isinstance(killed_for_good, GroupRestarted)

    @needs(OwnProcess)
    def test_between_calls(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """A rank that goes while nothing runs: the next call tells."""
        group = lasting()
        role = group.role("lasting", Lasting)
        os.kill(role.tell()[1][2], signal.SIGKILL)
        wait_until(lambda: group.generation == 1, "it is being restarted")
        with pytest.raises(GroupRestarted):
            role.add()
        group.wait_ready(PATIENCE_S)
        assert role.add() == [1, 1]

    @needs(OwnProcess)
    def test_a_hung_rank(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """A rank that doesn't come back after a failed call is as good as dead."""
        group = lasting()
        group._node.grace = 0.2
        role = group.role("lasting", Lasting)
        with Gate() as gate:
            with pytest.raises(colocate.errors.CallTimeout):
                role.wait.options(timeout=0.1)(gate.address)
            group.wait_ready(PATIENCE_S)
            wait_until(lambda: group.generation == 1, "it was restarted")
            group.wait_ready(PATIENCE_S)
        assert role.add() == [1, 1]

    @needs(OwnProcess)
    def test_closed_while_it_is_restarted(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """Closing wins, and whoever waits is told."""
        with Gate() as gate:
            group = lasting(gate=gate.address)
            killed(group)
            gate.wait_for(2)
            with pytest.raises(TimeoutError, match="restarting"):
                group.wait_ready(0.01)
            group.close(grace=0)
        with pytest.raises(ClosedError):
            group.wait_ready()
        assert group.state == "closed"

    @needs(OwnProcess)
    def test_residents_of_others(self, lasting: Callable[..., ColocatedGroup], spawn: Spawn) -> None:
        """A group that outlives the restart uses what the new generation has kept, not what the old one had."""
        group, other = lasting(), spawn({"rows": colocate.role(Rows)})
        role, rows = group.role("lasting", Lasting), other.role("rows", Rows)
        old = role.counted.keep([1, 2])
        assert [part for part, _ in rows.seen(old.ref)] == [[1], [2]]
        role.add()
        killed(group)
        group.wait_ready(PATIENCE_S)
        with pytest.raises(GroupRestarted):
            rows.seen(old.ref)
        role.add(10)
        assert [part for part, _ in rows.seen(role.counted.keep([1, 2]).ref)] == [[11], [12]]

    @needs(OwnProcess)
    def test_a_checkpoint_that_is_gone(self, lasting: Callable[..., ColocatedGroup], tmp_path: Path) -> None:
        """Nobody takes roles as constructed for those of a checkpoint whose folder was removed: the group fails."""
        group = lasting(restarts=1)
        group.checkpoint(tmp_path / "one")
        (tmp_path / "one" / "checkpoint.json").unlink()
        killed(group)
        with pytest.raises(WorkerDied) as caught:
            group.wait_ready(PATIENCE_S)
        assert "isn't there, as this machine sees it" in caught.value.__notes__[0]

    @needs(OwnProcess)
    def test_a_checkpoint_that_another_group_has_replaced(
        self, lasting: Callable[..., ColocatedGroup], tmp_path: Path
    ) -> None:
        """No group comes back with another one's state under its own tag: it fails, and says why."""
        group, other = lasting(restarts=1), lasting()
        group.checkpoint(tmp_path / "one", tag="mine")
        other.role("lasting", Lasting).add(99)
        other.checkpoint(tmp_path / "one", tag="the other's")
        killed(group)
        with pytest.raises(WorkerDied) as caught:
            group.wait_ready(PATIENCE_S)
        assert f'now there is "the other\'s" of group {other.name!r}' in caught.value.__notes__[0]

    @needs(OwnProcess)
    def test_a_restart_goes_on_from_what_was_restored(
        self, lasting: Callable[..., ColocatedGroup], tmp_path: Path
    ) -> None:
        """As long as there is no newer checkpoint."""
        other, group = lasting(), lasting()
        other.role("lasting", Lasting).add(5)
        other.checkpoint(tmp_path / "theirs")
        group.checkpoint(tmp_path / "mine")
        group.restore(tmp_path / "theirs")
        killed(group)
        assert group.wait_ready(PATIENCE_S) == "theirs"
        assert group.role("lasting", Lasting).add() == [6, 6]

    @needs(OwnProcess)
    def test_a_checkpoint_by_a_relative_path(
        self, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever folder the workers and, later on, the driver are in."""
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(Lasting)}
        spawn(roles).checkpoint(tmp_path / "one")
        monkeypatch.chdir(tmp_path)
        group = spawn(roles, restore="one", on_failure="restart")
        monkeypatch.undo()
        killed(group)
        assert group.wait_ready(PATIENCE_S) == "one"

    @needs(OwnProcess)
    def test_after_an_attempt_that_failed(self, spawn: Spawn) -> None:
        """Ranks that still run a call which failed elsewhere are told, though those before them never came back."""
        with Gate() as gate:
            roles: dict[str, RoleSpec[Any]] = {
                "lasting": colocate.role(Lasting),
                "breaks": colocate.role(Lasting, breaks=1).on(slots=[0]),
                "waits": colocate.role(Lasting, gate=gate.address).on(slots=[1]),
                "log": colocate.role(Log),
            }
            group = spawn(roles, on_failure="restart")
            group._node.grace = 0.2
            killed(group)
            wait_until(lambda: group.generation == 2, "the second attempt has begun")
        group.wait_ready(PATIENCE_S)
        group._node.grace = 10.0
        log = group.role("log", Log)
        with Gate() as gate, Gate() as trigger, group.role("lasting", Lasting).counted.keep([1, 2]) as kept:
            kept.fetch()
            call = log.cancelled_at.submit([gate.address, trigger.address], failing=1)  # type: ignore[arg-type]
            gate.wait_for()
            trigger.open()
            assert isinstance(call.exception(PATIENCE_S), RoleError)
            kept.fetch()  # an answer to what was sent after the news of the failure
        assert log.read() == [[("cancelled", True)], []]

    @needs(OwnProcess)
    def test_random_numbers_go_on(self, spawn: Spawn, tmp_path: Path) -> None:
        """A checkpoint keeps the states of generators."""
        pytest.importorskip("torch")
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(Lasting), "drawing": colocate.role(Drawing)}
        group = spawn(roles, on_failure="restart")
        drawing = group.role("drawing", Drawing)
        first = drawing.draw()
        group.checkpoint(tmp_path / "checkpoint")
        second = drawing.draw()
        killed(group)
        group.wait_ready(PATIENCE_S)
        assert first != second
        assert drawing.draw() == second
