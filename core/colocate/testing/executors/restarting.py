"""Groups that are restarted: together, from their last checkpoint, a bounded number of times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec, Runtime
from colocate.errors import ClosedError, ColocateError, GroupRestarted, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, of_executor
from colocate.testing.gate import Gate
from colocate.testing.probes.lasting import Drawing, Lasting, Passing
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
