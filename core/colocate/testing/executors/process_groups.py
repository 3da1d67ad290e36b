"""torch.distributed groups of a role's ranks, and what becomes of them when a call fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import Call, ColocatedGroup, Runtime
from colocate.errors import (
    CallTimeout,
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
from colocate.testing.executors._base import ExecutorCase, Shared, Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.careless import Careless, Independent
from colocate.testing.probes.faulty import Faulty
from colocate.testing.probes.rows import Axes
from colocate.testing.probes.tensors import Collective, Initializing, Launched, Meeting, Own, Together
from colocate.testing.waiting import PATIENCE_S, becomes_true


class ProcessGroups(ExecutorCase):
    """`ctx.process_group()`."""

    @pytest.fixture
    def ring(self, no_leaks: None, shared_square: Shared) -> ColocatedGroup:
        """A group for collectives that the test leaves as it was; torch is needed."""
        pytest.importorskip("torch")
        square = shared_square.get()
        with leaks.shared():  # in workers that share the driver's process these groups are the driver's descriptors
            for axis in (None, "tp"):
                square.role("solo", Collective).facts(axis)
            square.role("solo", Collective).mesh()
        return square

    @needs(OwnProcess)
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
        for role in (colocate.role(Together), colocate.role(Collective).on(default_group=True)):
            with pytest.raises(CapabilityError, match="role 'role' makes process groups of its 2 ranks") as caught:
                spawn({"role": role})
            assert caught.value.capability == "OwnProcess"
            assert spawn({"role": role}, slots=1).role("role", Collective).sum(1.0) == [1.0]

    @needs(OwnProcess)
    def test_same(self, ring: ColocatedGroup) -> None:
        """As long as no call fails it is one group."""
        assert ring.role("all", Collective).same_twice() == [True] * 4

    @needs(OwnProcess)
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

    @needs(OwnProcess)
    def test_default_group_of_who_does_not_ask(self, spawn: Spawn) -> None:
        """All slots make it, also those whose roles don't ask, and are busy."""
        pytest.importorskip("torch")
        group = spawn({"busy": colocate.role(Faulty).on(slots=[0]), "solo": colocate.role(Collective).on(slots=[1])})
        with Gate() as gate:
            call = group.role("busy", Faulty).wait.submit(gate.address)
            gate.wait_for()
            assert group.role("solo", Collective).in_default() == [(1, 2, [1])]
            gate.open()
            call.result(PATIENCE_S)

    def test_rendezvous(self, spawn: Spawn) -> None:
        """Constructors know where the slots meet; a store listens there."""
        pytest.importorskip("torch")
        with leaks.shared():
            meeting = spawn({"meeting": colocate.role(Meeting)}, slots=1).role("meeting", Meeting)
            meeting.put(["alone"])  # type: ignore[arg-type]
            assert meeting.take() == [["alone"]]

    @needs(OwnProcess)
    def test_rendezvous_of_several(self, spawn: Spawn) -> None:
        """It is one for all slots."""
        pytest.importorskip("torch")
        meeting = spawn({"meeting": colocate.role(Meeting)}).role("meeting", Meeting)
        meeting.put(["one", "other"])  # type: ignore[arg-type]
        assert meeting.take() == [["one", "other"]] * 2

    @needs(OwnProcess)
    def test_torchrun(self, spawn: Spawn) -> None:
        """Where a role wants torchrun's environment, its constructor finds that, and torch's default group."""
        pytest.importorskip("torch")
        launched = spawn({"launched": colocate.role(Launched).on(env="torchrun")}).role("launched", Launched)
        for rank, (found, by_torch, named) in enumerate(launched.facts()):
            assert (found["RANK"], found["WORLD_SIZE"]) == by_torch == (rank, 2)
            assert 0 <= found["LOCAL_RANK"] < found["LOCAL_WORLD_SIZE"] <= 2
            assert named

    @needs(OwnProcess)
    def test_a_second_default_group(self, spawn: Spawn) -> None:
        """A library that makes torch's default group itself, although it is there, fails in its role's constructor."""
        pytest.importorskip("torch")
        with pytest.raises(RoleStartError, match="the default process group is made by colocate already") as caught:
            spawn({"launched": colocate.role(Launched, fails=1).on(env="torchrun")})
        assert [*caught.value.errors] == [1]

    @needs(OwnProcess)
    def test_default_groups_of_two_libraries(self, spawn: Spawn) -> None:
        """Two that make it themselves, where nobody has said that one is wanted."""
        pytest.importorskip("torch")
        with pytest.raises(RoleStartError, match=r"A role of this worker has made .* say \.on\(default_group=True\)"):
            spawn({"one": colocate.role(Initializing), "other": colocate.role(Initializing)}, slots=1)

    @needs(OwnProcess)
    def test_torchrun_without_saying_so(self, spawn: Spawn) -> None:
        """A library that reads torchrun's environment, where nobody has said so."""
        pytest.importorskip("torch")
        with pytest.raises(RoleStartError, match=r'reads what torchrun sets: say \.on\(env="torchrun"\)'):
            spawn({"reading": colocate.role(Initializing, by_environment=True)}, slots=1)

    def test_torchrun_on_some_slots(self, spawn: Spawn) -> None:
        """Its environment is of all slots: a library would wait for those that the role isn't on."""
        with pytest.raises(
            ConfigError, match=r"of all 2 slots of the group \(WORLD_SIZE\), and the role is on 1 of them"
        ):
            spawn({"launched": colocate.role(Launched).on(slots=[1], env="torchrun")})

    def test_torchrun_on_threads(self, runtime: Runtime, spawn: Spawn) -> None:
        """They share the environment of their process, which is the driver's."""
        pytest.importorskip("torch")
        if not isinstance(runtime._node.services.executor, OwnProcess):
            with pytest.raises(CapabilityError, match="wants the environment of torchrun"):
                spawn({"launched": colocate.role(Launched).on(env="torchrun")}, slots=1)

    @needs(OwnProcess)
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
    def test_hold_while_peers_connect(self, ring: ColocatedGroup) -> None:
        """Who is called back when a group is nearly made has it afterwards, as its peers do, or none of them has."""
        pair = ring.role("pair", Collective)
        for number in range(20):
            for _ in range(2):  # the first cuts what there is, and in the second it is made
                with pytest.raises(RoleError, match="left before the collective"):
                    pair.sum_unless(1.0, number % 2)
            assert pair.sum(1.0) == [2.0] * 2

    @needs(OwnProcess)
    @pytest.mark.parametrize("elements", [4, 1 << 22])
    def test_cut_at_any_moment(self, ring: ColocatedGroup, elements: int) -> None:
        """Given up while a group is made, or in the midst of a transfer: all ranks come back, whoever gloo forgets."""
        mesh = ring.role("all", Collective)
        for number in range(10):
            with pytest.raises(CallTimeout):
                mesh.sum_without_end.options(timeout=0.003 * 1.5**number)(elements)
            assert mesh.sum(1.0) == [4.0] * 4

    @needs(OwnProcess)
    def test_hold_spares_the_others(self, ring: ColocatedGroup) -> None:
        """Ranks that the failed call isn't about go on with new groups too."""
        mesh, pair = ring.role("all", Collective), ring.role("pair", Collective)
        mesh.sum(1.0)
        with pytest.raises(RoleError):
            pair.sum_unless(1.0, 0)
        assert mesh.sum(1.0) == [4.0] * 4
        assert mesh.sum(1.0, axis="tp") == [2.0] * 4

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
        assert error is None or error.__cause__ is root
        assert last.result(PATIENCE_S) == [4.0] * 2

    @needs(OwnProcess)
    def test_hold_beside_a_later_collective(self, ring: ColocatedGroup) -> None:
        """Ranks that have begun a later call together end it, though the failure has cut another group of theirs."""
        pair, sender = ring.role("pair", Collective), ring.role("all", Collective)
        sender.sum(1.0)
        pair.sum(1.0)
        with Gate() as trigger, Gate() as first, Gate() as second:
            failing = sender.pass_gate_and_fail.options(ranks=[0]).submit(trigger.address, fail=True)
            later = pair.sum_at.submit([first.address, second.address], 1.0, -1)  # type: ignore[arg-type]
            first.wait_for()
            first.open()
            second.wait_for()
            trigger.wait_for()
            trigger.open()
            assert isinstance(failing.exception(PATIENCE_S), RoleError)
            assert not becomes_true(later.done, 0.5)
            second.open()
        assert later.result(PATIENCE_S) == [2.0] * 2

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
        assert error.__cause__ is root
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
    def test_default_group_after_it_was_cut(self, spawn: Spawn) -> None:
        """It is there again for a role, or a library in it, that only ever asks torch for it."""
        pytest.importorskip("torch")
        ring = spawn({"ring": colocate.role(Collective).on(default_group=True)}).role("ring", Collective)
        before = ring.sum_in_default()
        with pytest.raises(CallTimeout):
            ring.sum_in_default.options(timeout=0.5, ranks=[0])()
        assert ring.sum_in_default() == before

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
        assert error.__cause__ is root

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
    def test_a_slot_that_can_not_take_part(self, spawn: Spawn) -> None:
        """Where a slot can't do its part in the default group, whoever asks is told instead of waiting for it."""
        pytest.importorskip("torch")
        group = spawn({"one": colocate.role(Collective).on(slots=[0]), "other": colocate.role(Own).on(slots=[1])})
        group.role("other", Own).make()
        with pytest.raises(RoleError, match=r"slot 1 can't take part in the default group.*in this process already"):
            group.role("one", Collective).sum(1.0)

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

    def test_device_mesh_of_one(self, ring: ColocatedGroup) -> None:
        """A role of one rank has one on every executor."""
        (found,) = ring.role("solo", Collective).mesh()
        assert [place for place, _ in found.values()] == [0] * len(found)

    @needs(OwnProcess)
    def test_death_while_a_group_is_made(self, spawn: Spawn) -> None:
        """That torch can't make it without the rank that has died isn't the story either."""
        pytest.importorskip("torch")
        group = spawn({"ring": colocate.role(Collective)})
        call = group.role("ring", Collective).die_while_it_is_made.submit([True, False])  # type: ignore[arg-type]
        error = call.exception(PATIENCE_S)
        assert isinstance(error, WorkerDied)
        assert (error.rank, error.signal) == (0, "SIGKILL")

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
