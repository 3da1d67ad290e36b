"""torch.distributed groups of a role's ranks, and what becomes of who waits in them when a call fails."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.suite.probes.collectives import Careless, GroupRequest, Launched, Meeting

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.errors import (
    CapabilityError,
    ColocateError,
    ConfigError,
    RenewalError,
    RoleError,
    RoleStartError,
    WorkerDied,
)
from colocate.executor import OwnProcess
from colocate.testing import leaks
from colocate.testing.executors import collectives
from colocate.testing.executors._base import Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.collectives import Collective
from colocate.testing.probes.faulty import Faulty
from colocate.testing.waiting import PATIENCE_S


class ProcessGroups(collectives.ProcessGroups):
    """`ctx.process_group()`."""

    @needs(OwnProcess)
    def test_axis(self, ring: ColocatedGroup) -> None:
        """With an axis it has those that share all other coordinates; an axis that the mesh lacks has one rank."""
        mesh = ring.role("all", Collective)
        values: Any = [1.0, 2.0, 3.0, 4.0]
        assert mesh.sum_each(values, axis="tp") == [3.0, 3.0, 7.0, 7.0]
        assert mesh.sum_each(values, axis="dp") == [4.0, 6.0, 4.0, 6.0]
        assert mesh.sum_each(values, axis="pp") == values
        assert mesh.facts("tp") == [(0, 2), (1, 2), (0, 2), (1, 2)]

    def test_needs(self, runtime: Runtime, spawn: Spawn) -> None:
        """A role that says it makes them, or has torch's default one, isn't started where its ranks are threads."""
        pytest.importorskip("torch")
        if isinstance(runtime._node.services.executor, OwnProcess):
            assert spawn({"role": colocate.role(GroupRequest)}).role("role", GroupRequest).sum(1.0) == [2.0, 2.0]
            return
        with pytest.raises(CapabilityError, match="wants the environment of torchrun"):
            spawn({"launched": colocate.role(Launched).on(env="torchrun")}, slots=1)
        for role in (colocate.role(GroupRequest), colocate.role(Collective).on(default_group=True)):
            with pytest.raises(CapabilityError, match="role 'role' makes process groups of its 2 ranks") as caught:
                spawn({"role": role})
            assert caught.value.capability == "OwnProcess"
            assert spawn({"role": role}, slots=1).role("role", Collective).sum(1.0) == [1.0]

    @needs(OwnProcess)
    def test_default_group_at_once(self, spawn: Spawn) -> None:
        """Without being asked for it is there when a role says so, for what asks torch; several roles may."""
        pytest.importorskip("torch")
        roles = {name: colocate.role(Collective).on(default_group=True) for name in ("one", "other")}
        group = spawn({**roles, "third": colocate.role(Collective).on(slots=[1])})
        for name in roles:
            assert group.role(name, Collective).in_default(asks=False) == [(0, 2, []), (1, 2, [])]
        assert group.role("third", Collective).in_default(asks=False) == [(1, 2, [])]

    def test_rendezvous(self, spawn: Spawn) -> None:
        """Constructors know where the slots meet; a store listens there."""
        pytest.importorskip("torch")
        with leaks.share_between_tests():
            meeting = spawn({"meeting": colocate.role(Meeting)}, slots=1).role("meeting", Meeting)
            meeting.put(["alone"])  # type: ignore[arg-type]
            assert meeting.take() == [["alone"]]

    @needs(OwnProcess)
    def test_torchrun(self, spawn: Spawn) -> None:
        """Where a role wants torchrun's environment, its constructor finds that, and torch's default group.

        A script that makes and ends the group by itself takes up that one, unless it wants another.
        """
        pytest.importorskip("torch")
        launched = spawn({"launched": colocate.role(Launched).on(env="torchrun")}).role("launched", Launched)
        for rank, (env, by_torch, named) in enumerate(launched.facts()):
            assert (env["RANK"], env["WORLD_SIZE"]) == by_torch == (rank, 2)
            assert 0 <= env["LOCAL_RANK"] < env["LOCAL_WORLD_SIZE"] <= 2
            assert named
        for options, problem in (
            ({"rank": 5}, r"rank=5 \(there it is [01]\)"),
            ({"world_size": 3}, r"world_size=3 \(there it is 2\)"),
            ({"backend": "mpi"}, r"backend='mpi' \(there: gloo"),
        ):
            with pytest.raises(RoleStartError, match=f"that isn't what was asked for: {problem}"):
                spawn({"launched": colocate.role(Launched, **options).on(env="torchrun")})
        with pytest.raises(ConfigError, match=r"of all 2 slots of the group \(WORLD_SIZE\), and the role is on 1 of"):
            spawn({"launched": colocate.role(Launched).on(slots=[1], env="torchrun")})

    @needs(OwnProcess)
    def test_device_mesh(self, ring: ColocatedGroup) -> None:
        """The role's mesh as torch has them: named axes over its slots, each with the group of that axis."""
        meshes = ring.role("all", Collective).mesh()
        assert meshes == [
            {"dp": (0, 2), "tp": (0, 1)},
            {"dp": (0, 4), "tp": (1, 1)},
            {"dp": (1, 2), "tp": (0, 5)},
            {"dp": (1, 4), "tp": (1, 5)},
        ]
        assert ring.role("pair", Collective).mesh() == [{"dp": (0, 3)}, {"dp": (1, 3)}]

    @needs(OwnProcess)
    def test_device_mesh_by_name(self, square: ColocatedGroup) -> None:
        """Meshes of a role have their own axes and groups each, also where two name an axis alike."""
        pytest.importorskip("torch")
        named = square.role("named", Collective)
        train = [
            {"pp": (0, 2), "dp": (0, 1)},
            {"pp": (0, 4), "dp": (1, 1)},
            {"pp": (1, 2), "dp": (0, 5)},
            {"pp": (1, 4), "dp": (1, 5)},
        ]
        infer = [
            {"dp": (0, 2), "tp": (0, 1)},
            {"dp": (0, 4), "tp": (1, 1)},
            {"dp": (1, 2), "tp": (0, 5)},
            {"dp": (1, 4), "tp": (1, 5)},
        ]
        assert [named.mesh("train"), named.mesh("infer"), named.mesh("train")] == [train, infer, train]
        with pytest.raises(RoleError, match=r"has 'train' or 'infer'; say which"):
            named.mesh()
        with pytest.raises(RoleError, match=r"device_mesh\('trian'\).*did you mean 'train'"):
            named.mesh("trian")

    def test_one_rank(self, ring: ColocatedGroup) -> None:
        """A role of one rank has a group of one on every executor."""
        solo = ring.role("solo", Collective)
        assert solo.sum(3.0) == [3.0]
        assert solo.facts() == solo.facts("tp") == [(0, 1)]


class CutProcessGroups(collectives.CutProcessGroups):
    """Who waits in a collective for one that has failed is freed: the group is cut, and made anew."""

    @needs(OwnProcess)
    def test_hold_after_what_nobody_waits_for(self, ring: ColocatedGroup) -> None:
        """A call that one rank has done, and a rank that has failed before hasn't begun, is withdrawn from that one.

        In their next group it would meet an operation of a later call.
        """
        pair = ring.role("pair", Collective)
        pair.sum(1.0)
        with Gate() as fails:
            failing = pair.fail_soon.submit([fails.address, None])  # type: ignore[arg-type]
            earlier = pair.begin_sum.submit()
            assert pair.facts.options(ranks=[1])() == [(1, 2)]  # which comes after it there
            fails.open()
            with pytest.raises(RoleError, match="rank 0 has failed"):
                failing.result(PATIENCE_S)
            with pytest.raises(RoleError, match=r"pair\.begin_sum was withdrawn: rank 1 had done it, .* for rank 0"):
                earlier.result(PATIENCE_S)
        assert pair.sum_each([1.0, 2.0]) == [3.0] * 2  # type: ignore[arg-type]

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
    def test_hold_where_it_failed(self, ring: ColocatedGroup) -> None:
        """The rank that fails is held too: an async call that waits there for its peers is freed."""
        pair = ring.role("pair", Collective)
        with pytest.raises(RoleError):
            pair.sum_unless(1.0, 0)  # what there was is gone
        with Gate() as fails, Gate() as late, pair.sum.keep(1.0) as resident:
            resident.fetch()
            failing = pair.fail_soon.submit([fails.address, None])  # type: ignore[arg-type]
            beside_call = pair.sum_soon.submit([late.address, None])  # type: ignore[arg-type]
            fails.wait_for()
            late.wait_for()
            fails.open()
            root = failing.exception(PATIENCE_S)
            resident.fetch()  # an answer of each rank to what was sent after the news of the failure
            late.open()
        error = beside_call.exception(PATIENCE_S)
        assert isinstance(error, ColocateError)
        assert error.__cause__ == root
        assert pair.sum(1.0) == [2.0] * 2

    @pytest.mark.in_make_test("sum-given0")
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
    def test_what_a_cut_group_has_given(self, spawn: Spawn) -> None:
        """A cut collective gives no result, also where it doesn't raise: who made it failed with its peers."""
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
