"""Memory that keeps its addresses as it sleeps: offloads over `vmm.c`, on a driver and an allocator that are played.

What is away can't be touched: whoever does ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.unit.played_vmm import GRAIN, ROOM, Arena, PlayedVmm, fill

torch = pytest.importorskip("torch")

from tests.unit.test_sleeping import DEVICE, TAGS, Worker, worker  # noqa: E402, F401 - a fixture

from colocate import method  # noqa: E402
from colocate._role.context import reset_current, set_current, standalone_context  # noqa: E402
from colocate.errors import SleepingError  # noqa: E402
from colocate.worker.memory import ledger  # noqa: E402
from colocate.worker.memory.offload import Offload, Resized  # noqa: E402
from colocate.worker.memory.sleeping import Outcome, Sleeper  # noqa: E402
from colocate.worker.serving.functions import Functions  # noqa: E402


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    gpu = PlayedVmm(tmp_path)
    yield Arena(gpu, monkeypatch)
    gpu.end()


def storages(*tensors: Any) -> dict[int, Any]:
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


def test_away_and_back(arena: Arena) -> None:
    """The same bits at the same addresses, with views and tied weights; others have the memory meanwhile."""
    (weights,) = arena.segment(4 * GRAIN)
    net, tied = torch.nn.Linear(GRAIN // 4, 4, bias=False), torch.nn.Linear(GRAIN // 4, 4, bias=False)
    net.weight = tied.weight = torch.nn.Parameter(weights.view(torch.float32).view(4, -1).normal_())
    view, before, address = net.weight.detach()[2:], net.weight.detach().clone(), net.weight.data_ptr()
    offload, chosen = Offload(DEVICE), storages(net.weight)
    assert offload.write(chosen).put_away() == 0
    assert arena.gpu.state()[0] == 0
    assert all(map(offload.away, chosen))
    assert net.weight.untyped_storage().nbytes() == 4 * GRAIN
    for _ in range(2):  # it is tried while somebody has the memory
        arena.gpu.limit(4 * GRAIN)
        other = arena.gpu.alloc(GRAIN)
        assert other is not None
        with pytest.raises(MemoryError, match=r"256 KiB are needed on other:0: cuMemCreate: out of memory"):
            offload.bring_back(chosen)
        assert arena.gpu.state()[0] == GRAIN
        assert all(map(offload.away, chosen))
        arena.gpu.free(other)
    offload.bring_back(chosen)
    assert tied.weight is net.weight
    assert net.weight.data_ptr() == address
    assert torch.equal(net.weight, before)
    assert torch.equal(view, before[2:])


def test_what_torch_has_for_others(arena: Arena) -> None:
    """It is asked to give it back before a wake is given up."""
    (tensor,) = arena.segment(2 * GRAIN)
    tensor.fill_(3)
    offload, chosen = Offload(DEVICE), storages(tensor)
    offload.write(chosen).put_away()
    cached = arena.gpu.alloc(GRAIN)
    assert cached is not None
    arena.cached.append(cached)
    arena.gpu.limit(2 * GRAIN)
    offload.bring_back(chosen)
    assert bool((tensor == 3).all())


def test_what_others_have_in_it(arena: Arena) -> None:
    """It stays, and of what sleeps as much as lies in the same chunks; what nobody has goes with it."""
    half = GRAIN // 2
    first, _, _, other, _ = arena.segment(
        GRAIN + half, half, 3 * half, half, half, states={1: "active_pending_free", 2: "inactive", 4: "inactive"}
    )
    for tensor, value in ((first, 1), (other, 2)):
        tensor.fill_(value)
    offload, chosen = Offload(DEVICE), storages(first)
    assert offload.write(chosen).put_away() == half
    assert arena.gpu.vmm.absent(0) == (3 * GRAIN, GRAIN)  # of five: one of its own, and two of nobody's
    assert arena.gpu.state()[0] == 2 * GRAIN
    assert bool((other == 2).all())
    offload.bring_back(chosen)
    assert bool((first == 1).all())


def test_those_that_nobody_asked_for(arena: Arena) -> None:
    """A segment of somebody else, who may be about to make something there, stays as it is."""
    (tensor,) = arena.segment(GRAIN)
    arena.segment(2 * GRAIN, states={0: "inactive"})
    Offload(DEVICE).write(storages(tensor)).put_away()
    assert arena.gpu.state()[0] == 2 * GRAIN


def test_two_in_one_chunk(arena: Arena) -> None:
    """It goes with the second, and comes with the first; what is asleep stays so."""
    one, other = arena.segment(GRAIN // 2, GRAIN // 2)
    one.fill_(1)
    other.fill_(2)
    offload, first, second = Offload(DEVICE), storages(one), storages(other)
    assert offload.write(first).put_away() == GRAIN // 2
    assert arena.gpu.state()[0] == GRAIN
    assert offload.write(second).put_away() == 0
    assert arena.gpu.state()[0] == 0
    offload.bring_back(first)
    assert bool((one == 1).all())
    assert [offload.away(key) for key in (*first, *second)] == [False, True]
    offload.bring_back(second)
    offload.undo(second)  # the first one is awake, in the same chunk
    assert bool((one == 1).all())
    assert offload.write(first).put_away() == 0
    assert arena.gpu.state()[0] == 0
    offload.bring_back(second)
    assert [offload.away(key) for key in (*first, *second)] == [True, False]
    offload.bring_back(first)
    assert bool((one == 1).all())
    assert bool((other == 2).all())


def test_beside_others_that_are_resized(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made later loses its addresses; when one of them fails both are away as before."""
    (kept,) = arena.segment(GRAIN)
    kept.fill_(1)
    later = torch.full((1000,), 2)
    address = kept.data_ptr()
    offload, chosen = Offload(DEVICE), storages(kept, later)
    offload.write(chosen).put_away()
    assert (kept.untyped_storage().nbytes(), later.untyped_storage().nbytes()) == (GRAIN, 0)

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for cls, name in ((Offload, "_copying"), (Resized, "give")):
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, full)
            with pytest.raises(MemoryError, match="CUDA out of memory"):
                offload.bring_back(chosen)
        assert arena.gpu.state()[0] == 0
        assert later.untyped_storage().nbytes() == 0
    offload.bring_back(chosen)
    assert kept.data_ptr() == address
    assert bool((kept == 1).all())
    assert bool((later == 2).all())


def test_contents_that_nobody_needs(arena: Arena) -> None:
    """They come back as zeros."""
    (tensor,) = arena.segment(GRAIN)
    tensor.fill_(1)
    offload, chosen = Offload(DEVICE), storages(tensor)
    offload.write({}, chosen).put_away()
    assert arena.gpu.state()[0] == 0
    offload.bring_back(chosen)
    assert not tensor.any()


def test_what_has_not_changed_is_not_copied_again(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where storages are resized; and one that lies elsewhere now goes as it does from there."""
    (weights,) = arena.segment(GRAIN)
    weights.fill_(1)
    offload, chosen = Offload(DEVICE), storages(weights)
    copied: list[int] = []
    put = offload._put
    monkeypatch.setattr(offload, "_put", lambda storage: copied.append(storage.nbytes()) or put(storage))
    for _ in range(3):
        offload.write(chosen).put_away()
        offload.bring_back(chosen)
    assert copied == [GRAIN]
    assert bool((weights == 1).all())


def test_a_driver_that_keeps_it(arena: Arena) -> None:
    """The role sleeps, and what the driver doesn't let go of counts as staying."""
    (tensor,) = arena.segment(2 * GRAIN)
    tensor.fill_(1)
    offload, chosen = Offload(DEVICE), storages(tensor)
    offloading = offload.write(chosen)
    arena.gpu.fail_at(1)
    assert offloading.put_away() == 2 * GRAIN
    arena.gpu.fail_at(0)
    fill(tensor.data_ptr(), tensor.nbytes, 9)
    offload.bring_back(chosen)
    assert bool((tensor == 1).all())


STATES = "inactive", "active_allocated"  # of what nobody has


class Sleepers(RuleBasedStateMachine):
    """Tensors of any sizes, packed into segments, that sleep and wake in any order, also without room."""

    arena: Arena

    @initialize(sizes=st.lists(st.lists(st.integers(1, 3 * GRAIN), min_size=1, max_size=6), min_size=1, max_size=4))
    def begin(self, sizes: list[list[int]]) -> None:
        self.arena.gpu.limit(1 << 40)
        self.offload = Offload(DEVICE)
        self.tensors: list[Any] = []
        for blocks in sizes:
            aligned = [-(-size // 512) * 512 for size in blocks]
            states = {index: STATES[size % 2] for index, size in enumerate(blocks) if size % 5 == 0}
            self.tensors += [each for each in self.arena.segment(*aligned, states=states) if each is not None]
        for index, tensor in enumerate(self.tensors):
            tensor.fill_(index)
        self.places = [tensor.data_ptr() for tensor in self.tensors]
        self.asleep: set[int] = set()

    def _some(self, data: Any, of: set[int]) -> set[int]:
        return data.draw(st.sets(st.sampled_from(sorted(of)))) if of else set()

    @rule(data=st.data())
    def sleep(self, data: Any) -> None:
        chosen = self._some(data, set(range(len(self.tensors))) - self.asleep)
        left = self.offload.write(storages(*(self.tensors[index] for index in chosen))).put_away()
        assert 0 <= left <= sum(self.tensors[index].nbytes for index in chosen)
        self.asleep |= chosen

    @rule(data=st.data(), fits=st.booleans(), undone=st.booleans())
    def wake(self, data: Any, fits: bool, undone: bool) -> None:
        chosen = self._some(data, self.asleep)
        keys = storages(*(self.tensors[index] for index in chosen))
        if not fits:
            before = self.arena.gpu.state()
            self.arena.gpu.limit(before[0])
            try:
                self.offload.bring_back(keys)
            except MemoryError:
                assert self.arena.gpu.state() == before
                return
            finally:
                self.arena.gpu.limit(1 << 40)
        else:
            self.offload.bring_back(keys)
        if undone:
            self.offload.undo(keys)
        else:
            self.asleep -= chosen

    @invariant()
    def what_is_awake_is_as_it_was(self) -> None:
        if not hasattr(self, "tensors"):
            return
        for index, tensor in enumerate(self.tensors):
            assert tensor.data_ptr() == self.places[index]
            assert self.offload.away(tensor.untyped_storage()._cdata) is (index in self.asleep)
            if index not in self.asleep:
                assert bool((tensor == index).all())
        absent, used = self.arena.gpu.vmm.absent(0)
        assert used <= sum(self.tensors[index].nbytes for index in self.asleep)
        assert absent + self.arena.gpu.state()[0] == sum(each.size for each in self.arena.gpu.vmm.segments(0))

    def teardown(self) -> None:
        for segment in self.arena.gpu.vmm.segments(0):
            self.arena.gpu.free(segment.address)
        self.arena.segments.clear()
        assert self.arena.gpu.state() == (0, 0, 0)


def test_any_order(arena: Arena) -> None:
    """What is awake has its contents and its addresses, whatever sleeps beside it."""
    Sleepers.arena = arena
    run_state_machine_as_test(
        Sleepers,
        settings=settings(
            max_examples=50, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


class Graphed:
    """A role of which the constructor's memory keeps its addresses; there is some in it that nobody finds."""

    def __init__(self, arena: Arena) -> None:
        weights, self.cache, _ = arena.segment(3 * GRAIN, GRAIN, GRAIN // 2, states={2: "active_allocated"})
        self.net = torch.nn.Linear(1, 1, bias=False)
        self.net.weight = torch.nn.Parameter(weights.view(torch.float32).view(1, -1).fill_(7))
        self.cache.fill_(5)
        self.later = torch.ones(1000)

    @method(awake=("weights",))
    def look(self) -> float:
        return float(self.net.weight.detach().sum())


class TestRoles:
    """Roles with such memory."""

    def test_the_account(self, arena: Arena, worker: Worker) -> None:  # noqa: F811
        """What is there, what sleeps and what nobody owns add up to what the device has."""
        role = Graphed(arena)
        hosted = worker.add("role", role)
        sleeper = Sleeper(worker)

        def shares() -> ledger.Shares:
            return ledger.shares_of(worker, sleeper, {"role": ledger.look_at(worker, "role")[0]})

        size, later = 4 * GRAIN, role.later.nbytes
        awake = shares().owned["role"]
        assert awake == {("parameters", DEVICE): 3 * GRAIN, ("tensors", DEVICE): GRAIN + later}
        assert ledger._gpu(DEVICE) == {
            "allocated": size + GRAIN // 2,
            "reserved": size + GRAIN,
            "used": size + GRAIN,
            "total": ROOM,
        }
        assert sleeper.sleep("role", ("cache",), (), 1) == Outcome(nbytes=GRAIN + later)
        assert shares().owned["role"] == {("parameters", DEVICE): 3 * GRAIN}
        assert sleeper.sleep("role", TAGS, (), 1) == Outcome(nbytes=3 * GRAIN)
        assert (shares().owned["role"], shares().asleep["role"]) == ({}, size + later)
        assert ledger._gpu(DEVICE) == {"allocated": GRAIN // 2, "reserved": GRAIN, "used": GRAIN, "total": ROOM}
        with pytest.raises(SleepingError, match=r"role\.look needs memory of its role that sleeps"):
            sleeper.check(hosted, hosted.methods["look"])
        with pytest.raises(SleepingError):
            sleeper.refuse("role")
        assert sleeper.wake("role", ("weights",), 1, {}) == Outcome(nbytes=3 * GRAIN)
        sleeper.check(hosted, hosted.methods["look"])
        assert bool((role.net.weight == 7).all())
        sleeper.wake("role", TAGS, 1, {})
        assert shares().owned["role"] == awake
        assert bool((role.cache == 5).all())

    def test_what_a_graph_writes(self, arena: Arena, worker: Worker) -> None:  # noqa: F811
        """Its own memory stays, where a role of the worker keeps addresses: it is replayed."""
        role, other = Graphed(arena), Graphed(arena)
        private = {role.later.data_ptr(), role.cache.data_ptr(), other.later.data_ptr()}
        worker.device = SimpleNamespace(is_private=private.__contains__)
        hosted = worker.add("role", role)
        worker.add("other", other)
        sleeper, later = Sleeper(worker), role.later.nbytes
        hosted.keeps_addresses = True
        for name in ("role", "other"):
            assert sleeper.sleep(name, TAGS, (), 1) == Outcome(nbytes=4 * GRAIN)
            assert sleeper.asleep.kept_awake(name) == {"of a CUDA graph, which writes there": later}
        assert bool((role.later == 1).all())
        for name in ("role", "other"):
            sleeper.wake(name, TAGS, 1, {})
        hosted.keeps_addresses = False
        assert sleeper.sleep("role", TAGS, (), 1) == Outcome(nbytes=4 * GRAIN + later)

    def test_what_stays(self, arena: Arena, worker: Worker) -> None:  # noqa: F811
        """It doesn't count as gone, until what lies beside it sleeps as well."""
        role = Graphed(arena)
        weight, role.cache = (
            each.view(torch.float32).fill_(value)
            for value, each in enumerate(arena.segment(GRAIN + 1024, GRAIN - 1024))
        )
        role.net.weight = torch.nn.Parameter(weight)
        worker.add("role", role)
        sleeper = Sleeper(worker)
        worker.refusal = "rank 7: no room"
        assert sleeper.sleep("role", ("weights",), (), 1).refusal == "rank 7: no room"
        worker.refusal = None
        assert sleeper.sleep("role", ("weights",), (), 1) == Outcome(nbytes=GRAIN)
        assert sleeper.asleep.kept_awake("role") == {}  # it sleeps, though the device has it yet
        before = arena.gpu.state()
        worker.refusal = "rank 7: no room"
        assert sleeper.wake("role", ("weights",), 1, {}).refusal == "rank 7: no room"
        assert arena.gpu.state() == before
        worker.refusal = None
        assert bool((role.cache == 1).all())
        sleeper.sleep("role", ("cache",), (), 1)
        assert arena.gpu.state()[0] == before[0] - GRAIN
        sleeper.wake_alone(worker.roles["role"])
        assert not role.net.weight.any()
        assert bool((role.cache == 1).all())

    def test_what_is_told(self, arena: Arena, worker: Worker) -> None:  # noqa: F811
        """That a role sleeps, also where the device keeps all of it, and as many bytes as when it wakes."""
        role = Graphed(arena)
        weight, _ = arena.segment(GRAIN // 2, GRAIN // 2)
        role.net.weight = torch.nn.Parameter(weight.view(torch.float32).view(1, -1))
        role.cache = role.later = torch.empty(0)
        worker.add("role", role)
        site: Any = worker
        site.sleeper = Sleeper(worker)
        site.residency = SimpleNamespace(settle=lambda: None, make_room=lambda name: None)
        site.accounts = SimpleNamespace(moved=lambda name: None)
        functions: Any = Functions(site)
        token = set_current(standalone_context("role"))
        try:
            assert functions.sleep("role", ("weights",), (), {}, "asked for") == Outcome()
            assert functions.sleep("role", TAGS, (), {}, "asked for") == Outcome()
            functions.sleep("role", TAGS, (), {}, "asked for")
            functions.wake("role", TAGS, {}, "asked for")
            functions.wake("role", TAGS, {}, "asked for")
        finally:
            reset_current(token)
        told = [(each.asleep, each.nbytes, each.whole) for each in worker.said]
        assert told == [(True, GRAIN // 2, False), (True, 0, True), (False, GRAIN // 2, False)]

    def test_what_sleeps_is_discarded(self, arena: Arena, worker: Worker) -> None:  # noqa: F811
        """It comes back at its addresses, as zeros, and its copy is let go of."""
        role = Graphed(arena)
        worker.add("role", role)
        sleeper = Sleeper(worker)
        address = role.cache.data_ptr()
        sleeper.sleep("role", TAGS, (), 1)
        before = arena.gpu.state()
        assert sleeper.sleep("role", TAGS, ("cache",), 1) == Outcome()
        assert arena.gpu.state() == before
        sleeper.wake("role", TAGS, 1, {})
        assert role.cache.data_ptr() == address
        assert not role.cache.any()
        assert bool((role.net.weight == 7).all())
