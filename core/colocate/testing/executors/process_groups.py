"""torch.distributed groups of a role's ranks."""

from __future__ import annotations

from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.errors import (
    CapabilityError,
    ConfigError,
    RoleError,
)
from colocate.executor import OwnProcess
from colocate.testing import leaks
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, of_executor
from colocate.testing.probes.collectives import Collective, Launched, Meeting, Together


class ProcessGroups(ExecutorCase):
    """`ctx.process_group()`."""

    @needs(OwnProcess)
    @of_executor
    def test_all_ranks(self, ring: ColocatedGroup) -> None:
        """Without an axis the group has all ranks of the role, and torch knows their numbers."""
        assert ring.role("all", Collective).sum_each([1.0, 2.0, 3.0, 4.0]) == [10.0] * 4  # type: ignore[arg-type]
        assert ring.role("all", Collective).facts() == [(0, 4), (1, 4), (2, 4), (3, 4)]
        assert ring.role("pair", Collective).sum_each([1.0, 2.0]) == [3.0] * 2  # type: ignore[arg-type]
        assert ring.role("pair", Collective).facts() == [(0, 2), (1, 2)]

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
            assert spawn({"role": colocate.role(Together)}).role("role", Together).sum(1.0) == [2.0, 2.0]
            return
        with pytest.raises(CapabilityError, match="wants the environment of torchrun"):
            spawn({"launched": colocate.role(Launched).on(env="torchrun")}, slots=1)
        for role in (colocate.role(Together), colocate.role(Collective).on(default_group=True)):
            with pytest.raises(CapabilityError, match="role 'role' makes process groups of its 2 ranks") as caught:
                spawn({"role": role})
            assert caught.value.capability == "OwnProcess"
            assert spawn({"role": role}, slots=1).role("role", Collective).sum(1.0) == [1.0]

    @needs(OwnProcess)
    @of_executor
    def test_default_group(self, ring: ColocatedGroup) -> None:
        """Once a role has asked for a group, torch's default one has all slots, and the groups of all roles in it."""
        assert ring.role("all", Collective).in_default() == [(slot, 4, [0, 1, 2, 3]) for slot in range(4)]
        assert ring.role("pair", Collective).in_default() == [(slot, 4, [1, 2]) for slot in (1, 2)]
        assert ring.role("all", Collective).sum_in_default() == [6.0] * 4

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
        with leaks.shared():
            meeting = spawn({"meeting": colocate.role(Meeting)}, slots=1).role("meeting", Meeting)
            meeting.put(["alone"])  # type: ignore[arg-type]
            assert meeting.take() == [["alone"]]

    @needs(OwnProcess)
    def test_torchrun(self, spawn: Spawn) -> None:
        """Where a role wants torchrun's environment, its constructor finds that, and torch's default group."""
        pytest.importorskip("torch")
        launched = spawn({"launched": colocate.role(Launched).on(env="torchrun")}).role("launched", Launched)
        for rank, (found, by_torch, named) in enumerate(launched.facts()):
            assert (found["RANK"], found["WORLD_SIZE"]) == by_torch == (rank, 2)
            assert 0 <= found["LOCAL_RANK"] < found["LOCAL_WORLD_SIZE"] <= 2
            assert named
        with pytest.raises(ConfigError, match=r"of all 2 slots of the group \(WORLD_SIZE\), and the role is on 1 of"):
            spawn({"launched": colocate.role(Launched).on(slots=[1], env="torchrun")})

    @needs(OwnProcess)
    def test_device_mesh(self, ring: ColocatedGroup) -> None:
        """The role's mesh as torch has them: named axes over its slots, each with the group of that axis."""
        found = ring.role("all", Collective).mesh()
        assert found == [
            {"dp": (0, 2), "tp": (0, 1)},
            {"dp": (0, 4), "tp": (1, 1)},
            {"dp": (1, 2), "tp": (0, 5)},
            {"dp": (1, 4), "tp": (1, 5)},
        ]
        assert ring.role("pair", Collective).mesh() == [{"dp": (0, 3)}, {"dp": (1, 3)}]

    @needs(OwnProcess)
    def test_device_mesh_by_name(self, square: ColocatedGroup) -> None:
        """Each of a role's meshes has its own axes and groups, also where two name an axis alike."""
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

    def test_several_ranks_in_one_process(self, runtime: Runtime, ring: ColocatedGroup) -> None:
        """Several ranks need a process each; where they share one, the error says what to use."""
        pair = ring.role("pair", Collective)
        if isinstance(runtime._node.services.executor, OwnProcess):
            assert pair.facts() == [(0, 2), (1, 2)]
            return
        with pytest.raises(CapabilityError, match="processes=True") as caught:
            pair.facts()
        assert caught.value.capability == "OwnProcess"
