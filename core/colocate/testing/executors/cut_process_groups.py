"""What becomes of process groups, and of who waits in them, when a call fails or a rank dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import Call, ColocatedGroup
from colocate.errors import (
    ColocateError,
    RenewalError,
    RoleError,
    WorkerDied,
)
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, of_executor
from colocate.testing.gate import Gate
from colocate.testing.probes.careless import Careless, Independent
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.rows import Axes
from colocate.testing.waiting import PATIENCE_S


class CutProcessGroups(ExecutorCase):
    """Who waits in a collective for one that has failed is freed: the group is cut, and made anew."""

    @needs(OwnProcess)
    @of_executor
    def test_hold_in_a_collective(self, ring: ColocatedGroup) -> None:
        """Rank 1 raises before a collective in which rank 0 waits: its error comes at once, and rank 0 is freed."""
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

    @needs(OwnProcess)
    def test_hold_with_a_queue(self, ring: ColocatedGroup) -> None:
        """Collectives of calls that were queued already pair with each other, and with nothing of the failed call."""
        pair = ring.role("pair", Collective)
        pair.sum(1.0)
        for failing in (0, 1, 0):
            calls: list[Call[Any]] = [pair.sum.submit(float(index)) for index in range(3)]
            failed = pair.sum_unless.submit(100.0, failing)
            calls += [pair.sum.submit(float(index)) for index in range(3, 8)]
            error = failed.exception(PATIENCE_S)
            assert isinstance(error, RoleError)
            assert error.rank == failing
            assert [call.result(PATIENCE_S) for call in calls] == [[2.0 * index] * 2 for index in range(8)]

    @needs(OwnProcess)
    def test_hold_while_groups_are_made(self, ring: ColocatedGroup) -> None:
        """A rank that waits for its peers to make the group is freed too."""
        pair = ring.role("pair", Collective)
        with pytest.raises(RoleError):
            pair.sum_unless(1.0, 0)  # what there was is gone
        with Gate() as trigger:
            call = pair.fail_before_group.submit([None, trigger.address], failing=1)  # type: ignore[arg-type]
            trigger.wait_for()
            trigger.open()
            error = call.exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        assert error.rank == 1
        assert pair.sum(1.0) == [2.0] * 2

    @needs(OwnProcess)
    def test_hold_before_a_later_collective(self, ring: ColocatedGroup) -> None:
        """A rank in a later call's collective, which its peers won't begin before the hold is over, is freed."""
        pair, sender = ring.role("pair", Collective), ring.role("all", Collective)
        pair.sum(1.0)
        mark = ring.role("axes", Axes).echo.keep("any")
        with Gate() as busy, Gate() as trigger, Gate() as begun:
            earlier = sender.pass_gate_and_fail.options(ranks=[2]).submit(busy.address, fail=False)
            failing = sender.pass_gate_and_fail.options(ranks=[0]).submit(trigger.address, fail=True)
            later = pair.sum_at.submit([begun.address, None], 1.0, -1)  # type: ignore[arg-type]  # on slot 1 only
            last = pair.sum.submit(2.0)
            busy.wait_for()
            begun.wait_for()
            begun.open()
            trigger.wait_for()
            trigger.open()
            root = failing.exception(PATIENCE_S)
            assert isinstance(root, RoleError)
            mark.fetch()  # who answers has heard of the hold, and so begins nothing later once it isn't busy any more
        mark.free()
        assert earlier.result(PATIENCE_S) == [None]
        error = later.exception(PATIENCE_S)
        assert error is None or error.__cause__ == root
        assert last.result(PATIENCE_S) == [4.0] * 2

    @needs(OwnProcess)
    def test_hold_where_it_failed(self, ring: ColocatedGroup) -> None:
        """The rank that fails is held too: an async call that waits there for its peers is freed."""
        pair = ring.role("pair", Collective)
        with pytest.raises(RoleError):
            pair.sum_unless(1.0, 0)  # what there was is gone
        with Gate() as fails, Gate() as late, pair.sum.keep(1.0) as kept:
            kept.fetch()
            failing = pair.fail_soon.submit([fails.address, None])  # type: ignore[arg-type]
            beside = pair.sum_soon.submit([late.address, None])  # type: ignore[arg-type]
            fails.wait_for()
            late.wait_for()
            fails.open()
            root = failing.exception(PATIENCE_S)
            kept.fetch()  # an answer of each rank to what was sent after the news of the failure
            late.open()
        error = beside.exception(PATIENCE_S)
        assert isinstance(error, ColocateError)
        assert error.__cause__ == root
        assert pair.sum(1.0) == [2.0] * 2

    @needs(OwnProcess)
    @pytest.mark.parametrize(("method", "given"), [("sum", [1.0]), ("sum_in_default", [])])
    def test_a_peer_that_never_comes(self, no_leaks: None, method: str, given: list[float]) -> None:
        """Torch gives up who waits for one that isn't called, after the runtime's `collective_timeout`."""
        pytest.importorskip("torch")
        with self.connect(collective_timeout=2.25) as runtime, runtime.reserve(2, cpus=0) as pool:
            group = pool.spawn({"ring": colocate.role(Collective).on(default_group=True)})
            ring = group.role("ring", Collective)
            total = getattr(ring, method)
            total(*given)
            began = time.monotonic()
            error = total.options(ranks=[0]).submit(*given).exception(PATIENCE_S)
            assert time.monotonic() - began >= 2.25
            assert isinstance(error, RoleError)
            assert error.rank == 0
            assert "Timed out waiting 2250ms" in str(error)
            assert ring.sum(1.0) == [2.0, 2.0]

    @needs(OwnProcess)
    def test_a_default_group_that_a_role_makes(self, spawn: Spawn, tmp_path: Path) -> None:
        """It is cut as those are that colocate makes: nobody waits for who has failed."""
        pytest.importorskip("torch")
        ring = spawn({"ring": colocate.role(Independent, str(tmp_path))}).role("ring", Independent)
        assert ring.total() == [2.0] * 2
        with Gate() as gate:
            failing = ring.total.submit(1, gate.address)
            gate.wait_for(2)
            gate.open()
            error = failing.exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        assert "on purpose" in str(error)
        assert ring.total() == [2.0] * 2

    @needs(OwnProcess)
    def test_what_a_cut_group_has_given(self, spawn: Spawn) -> None:
        """It is no result, also where a collective on a cut group doesn't raise: who made it failed with its peers."""
        pytest.importorskip("torch")
        careless = spawn({"careless": colocate.role(Careless)}).role("careless", Careless)
        assert careless.total() == [2.0] * 2
        with Gate() as failing, Gate() as beginning:
            root = careless.fail.submit(1, failing.address)
            later = careless.total.submit(beginning.address)
            beginning.wait_for(1)  # rank 0 is in it, for which rank 1 will never come
            beginning.open()
            failing.open()
            assert isinstance(root.exception(PATIENCE_S), RoleError)
            error = later.exception(PATIENCE_S)
        assert isinstance(error, ColocateError)
        assert "process groups were cut while careless.total used them" in str(error)
        assert careless.total() == [2.0] * 2

    @needs(OwnProcess)
    def test_kept_group(self, spawn: Spawn) -> None:
        """A group on which nobody waits when a call fails goes on."""
        pytest.importorskip("torch")
        group = spawn({"keeper": colocate.role(Collective), "faulty": colocate.role(Faulty)})
        keeper = group.role("keeper", Collective)
        assert keeper.keep_group() == [2.0] * 2
        for _ in range(2):
            assert isinstance(group.role("faulty", Faulty).fail.submit(ranks=(1,)).exception(PATIENCE_S), RoleError)
            assert keeper.sum_kept() == [2.0] * 2
            assert keeper.sum(1.0) == [2.0] * 2

    @needs(OwnProcess)
    @pytest.mark.parametrize(("method", "name"), [("sum_kept", "'sinner/*'"), ("sum_in_own", "'0'")])
    def test_kept_group_that_is_cut(self, spawn: Spawn, method: str, name: str) -> None:
        """A role that keeps one on which ranks have waited in vain fails the whole group, and is told what to do.

        That is so as well of one that it has made by itself.
        """
        pytest.importorskip("torch")
        group = spawn({"sinner": colocate.role(Collective).on(default_group=True)})
        sinner = group.role("sinner", Collective)
        sinner.keep_group() if method == "sum_kept" else sinner.sum_in_own()
        with Gate() as gate:
            failing = getattr(sinner, method).submit(failing=1, gate=gate.address)
            queued = sinner.sum.submit(1.0)
            gate.wait_for(2)
            gate.open()
            root = failing.exception(PATIENCE_S)
        assert isinstance(root, RoleError)
        assert root.rank == 1
        error = queued.exception(PATIENCE_S)
        assert isinstance(error, RenewalError)
        assert f"still holds the process group {name}" in str(error)
        assert "renew(self)" in str(error)
        assert error.role == ("sinner" if method == "sum_kept" else None)
        assert error.__cause__ == root

    @needs(OwnProcess)
    def test_transfers(self, spawn: Spawn) -> None:
        """Who waits for a send or a receive in vain is freed; those that have ended are no reason to cut anything."""
        pytest.importorskip("torch")
        group = spawn({"pair": colocate.role(Collective), "faulty": colocate.role(Faulty)})
        pair = group.role("pair", Collective)
        assert pair.keep_group() == [2.0] * 2
        assert pair.pass_on() == [0.0, 0.0]
        assert isinstance(group.role("faulty", Faulty).fail.submit(ranks=(1,)).exception(PATIENCE_S), RoleError)
        assert pair.sum_kept() == [2.0] * 2
        pair.forget_group()
        assert isinstance(pair.pass_on.submit(0).exception(PATIENCE_S), RoleError)
        assert pair.sum(1.0) == [2.0] * 2
        assert pair.pass_on() == [0.0, 0.0]

    @needs(OwnProcess)
    def test_death_in_a_collective(self, ring: ColocatedGroup) -> None:
        """When a rank dies, those that wait for it in a collective aren't the story: its death is."""
        pair = ring.role("pair", Collective)  # the last test of these groups: it ends them
        pair.sum(1.0)
        with Gate() as trigger:
            call = pair.sum_or_die.submit([None, trigger.address], 1.0)  # type: ignore[arg-type]
            trigger.wait_for()
            trigger.open()
            error = call.exception(PATIENCE_S)
        assert isinstance(error, WorkerDied)
        assert (error.rank, error.signal) == (2, "SIGKILL")
