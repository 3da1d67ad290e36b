"""Groups that restart after a failure: lost calls and residents, refused calls, limits and closing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec
from colocate.errors import ClosedError, GroupRestarted, WorkerDied
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.rows import Rows
from colocate.testing.waiting import PATIENCE_S, wait_until


def kill_and_get_error(group: ColocatedGroup, rank: int = 0) -> GroupRestarted:
    """Kill a rank in a call, and return the call's error."""
    with pytest.raises(GroupRestarted) as caught:
        group.role("lasting", Lasting).kill(rank)
    return caught.value


def do_nothing(ctx: colocate.Context) -> None:
    """Do nothing: another call of the group."""


class Restarting(ExecutorCase):
    """`on_failure="restart"`, `group.wait_ready`."""

    @pytest.fixture
    def lasting(self, spawn: Spawn) -> Callable[..., ColocatedGroup]:
        """Return a function that spawns a restarting group."""

        def make(slots: int = 2, restarts: int = 3, more: dict[str, RoleSpec[Any]] | None = None, **given: Any) -> Any:
            roles = {"lasting": colocate.role(Lasting, **given), **(more or {})}
            return spawn(roles, slots=slots, on_failure="restart", restarts=restarts)

        return make

    @needs(OwnProcess)
    def test_pending_calls_fail_with_one_error(self, lasting: Callable[..., ColocatedGroup], spawn: Spawn) -> None:
        """Calls and residents of the old generation fail with one GroupRestarted, caused by the worker's death.

        Residents of the new generation work in other groups that used the old ones.
        """
        group = lasting()
        role, other = group.role("lasting", Lasting), spawn({"rows": colocate.role(Rows)}, slots=1).role("rows", Rows)
        resident = role.counted.keep([1, 2])
        assert other.double(resident.ref) == [2, 4]
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
        for lost in (resident, queued):
            for use in (lost.fetch, lambda lost=lost: lost.spec, lambda lost=lost: role.counted(lost.ref)):
                with pytest.raises(GroupRestarted):
                    use()
        del resident, queued, lost, use
        with role.counted.keep([1, 2]) as resident:
            assert other.double(resident.ref) == [2, 4]
        group.close()  # No failure is left to raise.

    @needs(OwnProcess)
    @needs_feature("pipelines")
    @needs_feature("functions")
    def test_restarted_group_refuses_calls_until_ready(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """A restarted group refuses calls until `wait_ready` was called."""
        group = lasting()
        role = group.role("lasting", Lasting)
        kill_and_get_error(group)
        wait_until(lambda: group.state == "ready", "the group is there again")
        for call in (role.add, role.add.submit, role.add.keep, lambda: group.run(lambda ctx: None)):
            with pytest.raises(GroupRestarted):
                call()
        with pytest.raises(GroupRestarted), group.pipeline():
            role.add.submit()
        group.wait_ready()
        assert role.add() == [1, 1]

    @needs(OwnProcess)
    def test_restart_attempts_are_bounded(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """A group whose restarts all fail raises the first error, with the last reason as a note."""
        group = lasting(restarts=2, breaks=9)
        error = kill_and_get_error(group)
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
    def test_a_hung_rank(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """A rank that isn't back within the grace after a timeout makes the group restart."""
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
    def test_close_ends_the_restart(self, lasting: Callable[..., ColocatedGroup]) -> None:
        """Closing a restarting group ends the restart, and `wait_ready` raises ClosedError."""
        with Gate() as gate:
            group = lasting(gate=gate.address)
            kill_and_get_error(group)
            gate.wait_for(2)
            with pytest.raises(TimeoutError, match="restarting"):
                group.wait_ready(0.01)
            group.close(grace=0)
        with pytest.raises(ClosedError):
            group.wait_ready()
        assert group.state == "closed"
