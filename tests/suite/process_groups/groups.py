"""torch.distributed groups of a role's ranks, and the end of waits in these groups when a call fails."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.suite.probes.collectives import Careless, GroupUser, Launched, Meeting

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
        """An axis' group has the ranks that share all other coordinates; an axis outside the mesh has one rank."""
        mesh = ring.role("all", Collective)
        values: Any = [1.0, 2.0, 3.0, 4.0]
        assert mesh.sum_each(values, axis="tp") == [3.0, 3.0, 7.0, 7.0]
        assert mesh.sum_each(values, axis="dp") == [4.0, 6.0, 4.0, 6.0]
        assert mesh.sum_each(values, axis="pp") == values
        assert mesh.facts("tp") == [(0, 2), (1, 2), (0, 2), (1, 2)]

    def test_needs(self, runtime: Runtime, spawn: Spawn) -> None:
        """On threads a role of several ranks that makes process groups, or wants torchrun's environment, is refused."""
        pytest.importorskip("torch")
        if isinstance(runtime._node.services.executor, OwnProcess):
            assert spawn({"role": colocate.role(GroupUser)}).role("role", GroupUser).sum(1.0) == [2.0, 2.0]
            return
        with pytest.raises(CapabilityError, match="wants the environment of torchrun"):
            spawn({"launched": colocate.role(Launched).on(env="torchrun")}, slots=1)
        for role in (colocate.role(GroupUser), colocate.role(Collective).on(default_group=True)):
            with pytest.raises(CapabilityError, match="role 'role' makes process groups of its 2 ranks") as caught:
                spawn({"role": role})
            assert caught.value.capability == "OwnProcess"
            assert spawn({"role": role}, slots=1).role("role", Collective).sum(1.0) == [1.0]

    @needs(OwnProcess)
    def test_default_group_at_once(self, spawn: Spawn) -> None:
        """With `default_group=True` torch's default group exists without a request, for several roles at once."""
        pytest.importorskip("torch")
        roles = {name: colocate.role(Collective).on(default_group=True) for name in ("one", "other")}
        group = spawn({**roles, "third": colocate.role(Collective).on(slots=[1])})
        for name in roles:
            assert group.role(name, Collective).in_default(asks=False) == [(0, 2, []), (1, 2, [])]
        assert group.role("third", Collective).in_default(asks=False) == [(1, 2, [])]

    def test_rendezvous(self, spawn: Spawn) -> None:
        """Constructors know the address of the slots' rendezvous, where a store listens."""
        pytest.importorskip("torch")
        with leaks.share_between_tests():
            meeting = spawn({"meeting": colocate.role(Meeting)}, slots=1).role("meeting", Meeting)
            meeting.put(["alone"])  # type: ignore[arg-type]
            assert meeting.take() == [["alone"]]

    @needs(OwnProcess)
    def test_torchrun(self, spawn: Spawn) -> None:
        """With `env="torchrun"` a constructor finds torchrun's environment, and torch's default group.

        A script that makes the default group by itself gets the existing one; other options are refused.
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
            with pytest.raises(RoleStartError, match=f"that group doesn't match: {problem}"):
                spawn({"launched": colocate.role(Launched, **options).on(env="torchrun")})
        with pytest.raises(ConfigError, match=r"of all 2 slots of the group \(WORLD_SIZE\), and the role is on 1 of"):
            spawn({"launched": colocate.role(Launched).on(slots=[1], env="torchrun")})

    @needs(OwnProcess)
    def test_device_mesh(self, ring: ColocatedGroup) -> None:
        """`ctx.device_mesh()` has the role's named axes over its slots, each with that axis' group."""
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
        """Named meshes of a role have their own axes and groups, even if two meshes name an axis alike."""
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
    """A failed call ends other ranks' waits in a collective: the group is cut, and made anew."""

    @needs(OwnProcess)
    def test_hold_withdraws_partly_completed_call(self, ring: ColocatedGroup) -> None:
        """A call that one rank has completed is withdrawn if a failed rank hasn't begun the call.

        In the next group the failed rank's operation would meet one of a later call.
        """
        pair = ring.role("pair", Collective)
        pair.sum(1.0)
        with Gate() as fails:
            failing = pair.fail_soon.submit([fails.address, None])  # type: ignore[arg-type]
            earlier = pair.begin_sum.submit()
            assert pair.facts.options(ranks=[1])() == [(1, 2)]  # Runs after `begin_sum` on rank 1.
            fails.open()
            with pytest.raises(RoleError, match="rank 0 has failed"):
                failing.result(PATIENCE_S)
            with pytest.raises(RoleError, match=r"pair\.begin_sum was withdrawn: rank 1 had done it, .* for rank 0"):
                earlier.result(PATIENCE_S)
        assert pair.sum_each([1.0, 2.0]) == [3.0] * 2  # type: ignore[arg-type]

    @needs(OwnProcess)
    def test_hold_while_groups_are_made(self, ring: ColocatedGroup) -> None:
        """A failure also ends a rank's wait for peers that are needed to make the group."""
        pair = ring.role("pair", Collective)
        with pytest.raises(RoleError):
            pair.sum_unless(1.0, 0)  # The failure drops the existing group.
        with Gate() as trigger:
            call = pair.fail_before_group.submit([None, trigger.address], failing=1)  # type: ignore[arg-type]
            trigger.wait_for()
            trigger.open()
            error = call.exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        assert error.rank == 1
        assert pair.sum(1.0) == [2.0] * 2

    @needs(OwnProcess)
    def test_hold_ends_async_call_on_failed_rank(self, ring: ColocatedGroup) -> None:
        """A failure also ends an async call on the failed rank that waits for peers."""
        pair = ring.role("pair", Collective)
        with pytest.raises(RoleError):
            pair.sum_unless(1.0, 0)  # The failure drops the existing group.
        with Gate() as fails, Gate() as late, pair.sum.keep(1.0) as resident:
            resident.fetch()
            failing = pair.fail_soon.submit([fails.address, None])  # type: ignore[arg-type]
            beside_call = pair.sum_soon.submit([late.address, None])  # type: ignore[arg-type]
            fails.wait_for()
            late.wait_for()
            fails.open()
            root = failing.exception(PATIENCE_S)
            resident.fetch()  # Each rank has now processed the failure.
            late.open()
        error = beside_call.exception(PATIENCE_S)
        assert isinstance(error, ColocateError)
        assert error.__cause__ == root
        assert pair.sum(1.0) == [2.0] * 2

    @pytest.mark.in_make_test("sum-given0")
    @needs(OwnProcess)
    @pytest.mark.parametrize(("method", "given"), [("sum", [1.0]), ("sum_in_default", [])])
    def test_a_peer_that_never_comes(self, no_leaks: None, method: str, given: list[float]) -> None:
        """A wait for a peer that isn't called ends after the runtime's `collective_timeout`."""
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
    def test_call_ignoring_cut_collective_fails(self, spawn: Spawn) -> None:
        """A call that ignores the end of a cut collective fails all the same."""
        pytest.importorskip("torch")
        careless = spawn({"careless": colocate.role(Careless)}).role("careless", Careless)
        assert careless.total() == [2.0] * 2
        with Gate() as failing, Gate() as beginning:
            root = careless.fail.submit(1, failing.address)
            later = careless.total.submit(beginning.address)
            beginning.wait_for(1)  # Rank 0 waits in the collective that rank 1 never joins.
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
        """A role that keeps a cut process group fails the whole group, with an error that says what to do.

        The same is true of a process group that the role has made by itself.
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
        """A failure ends a send or receive that waits in vain, and completed transfers cause no cut."""
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
        """A rank's death in a collective is reported as a death, not as the peers' failures."""
        pair = ring.role("pair", Collective)  # The last test with these groups: the death ends them.
        pair.sum(1.0)
        with Gate() as trigger:
            call = pair.sum_or_die.submit([None, trigger.address], 1.0)  # type: ignore[arg-type]
            trigger.wait_for()
            trigger.open()
            error = call.exception(PATIENCE_S)
        assert isinstance(error, WorkerDied)
        assert (error.rank, error.signal) == (2, "SIGKILL")
