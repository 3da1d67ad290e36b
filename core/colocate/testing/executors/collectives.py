"""Tests of torch's process groups across the slots of an executor, also after a failed call."""

from __future__ import annotations

from colocate import ColocatedGroup
from colocate.errors import RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.waiting import PATIENCE_S


class ProcessGroups(ExecutorCase):
    """Tests of `ctx.process_group()`."""

    @needs(OwnProcess)
    @needs_feature("process_groups")
    def test_all_ranks(self, ring: ColocatedGroup) -> None:
        """Without an axis, the process group has all ranks of the role, with the role's rank numbers."""
        assert ring.role("all", Collective).sum_each([1.0, 2.0, 3.0, 4.0]) == [10.0] * 4  # type: ignore[arg-type]
        assert ring.role("all", Collective).facts() == [(0, 4), (1, 4), (2, 4), (3, 4)]
        assert ring.role("pair", Collective).sum_each([1.0, 2.0]) == [3.0] * 2  # type: ignore[arg-type]
        assert ring.role("pair", Collective).facts() == [(0, 2), (1, 2)]

    @needs(OwnProcess)
    @needs_feature("process_groups")
    def test_default_group(self, ring: ColocatedGroup) -> None:
        """After a role has asked for a process group, torch's default group has all slots."""
        assert ring.role("all", Collective).in_default() == [(slot, 4, [0, 1, 2, 3]) for slot in range(4)]
        assert ring.role("pair", Collective).in_default() == [(slot, 4, [1, 2]) for slot in (1, 2)]
        assert ring.role("all", Collective).sum_in_default() == [6.0] * 4


class CutProcessGroups(ExecutorCase):
    """A rank that waits in a collective for a failed rank is unblocked, and the process group is created again."""

    @needs(OwnProcess)
    @needs_feature("process_groups")
    def test_hold_in_a_collective(self, ring: ColocatedGroup) -> None:
        """If rank 1 raises while rank 0 waits in a collective, the error is raised at once and rank 0 is unblocked."""
        pair = ring.role("pair", Collective)
        pair.sum(1.0)
        with Gate() as trigger:
            call = pair.sum_at.submit([None, trigger.address], 1.0, failing=1)  # type: ignore[arg-type]
            trigger.wait_for()
            trigger.open()
            error = call.exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        assert error.rank == 1
        assert isinstance(error.__cause__, ValueError)
        assert "left before the collective" in str(error)
        assert pair.sum_each([1.0, 2.0]) == [3.0] * 2  # type: ignore[arg-type]
