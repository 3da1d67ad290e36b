"""Memory of the host that sleeps: how what trains comes back, how all else does, and what nobody needs."""

from __future__ import annotations

import mmap
import threading
import types
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from colocate._protocol.ledger import Purpose  # noqa: E402
from colocate._role import torch_works  # noqa: E402
from colocate._role.context import CallState, running_call, standalone_context  # noqa: E402
from colocate._role.role import methods_of  # noqa: E402
from colocate._system import mappings, pages  # noqa: E402
from colocate.errors import ColocateError, ConfigError  # noqa: E402
from colocate.worker import holdings, moves, storages  # noqa: E402
from colocate.worker.accounts import Accounts  # noqa: E402
from colocate.worker.gradients import Gradients  # noqa: E402
from colocate.worker.hosted import HostedRole  # noqa: E402
from colocate.worker.ledger import ledger  # noqa: E402
from colocate.worker.offload import Offloading  # noqa: E402
from colocate.worker.prefetch import Prefetch  # noqa: E402
from colocate.worker.process_memory import InFiles  # noqa: E402
from colocate.worker.scope import Scope  # noqa: E402
from colocate.worker.settings import Setting  # noqa: E402
from colocate.worker.sleeping import Sleeper  # noqa: E402
from colocate.worker.store import Store  # noqa: E402

TAGS = ("weights", "grads", "optimizer", "cache")
SIDE = 2048
PIECE = 4 * SIDE * SIDE


class Model:
    """A role with five pieces of one size: a model that has trained, with momentum; a frozen one; a cache."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.frozen = torch.nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)
        self.cache = torch.ones(SIDE, SIDE)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.train()

    def train(self) -> None:
        self.net(torch.ones(1, SIDE)).sum().backward()
        self.optimizer.step()

    def pieces(self) -> list[Any]:
        (state,) = self.optimizer.state.values()
        weight = self.net.weight
        return [weight.detach(), weight.grad, state["momentum_buffer"], self.frozen.weight, self.cache]


@pytest.fixture
def site() -> Any:
    """A worker without roles, the only one of its group."""

    def ask(question: Any) -> None:
        if question.refusal:
            raise ColocateError(question.refusal)

    boot: Any = types.SimpleNamespace(device="cpu", node="node")
    lane = types.SimpleNamespace(resumed=0)
    running_call.set(CallState(1))
    return types.SimpleNamespace(
        boot=boot,
        store=Store(False, Scope()),
        roles={},
        spill_dir="/var/tmp",
        in_process=False,
        lane=lane,
        ask=ask,
    )


def add(site: Any, instance: Any) -> HostedRole:
    """Have it be the worker's one role."""
    setting, ctx = Setting("cpu", in_process=False), standalone_context("model")
    role = site.roles["model"] = HostedRole("model", instance, methods_of(type(instance)), ctx, setting)
    return role


class Summing:
    """A work of torch's: it has written when it was waited for, or within that time it hasn't."""

    def __init__(self, values: Any, comes: bool) -> None:
        self.values, self.comes = values, comes
        self.done = False

    def get_future(self) -> None:
        """It is a collective."""

    def is_completed(self) -> bool:
        return self.done

    def wait(self, timeout: Any) -> None:
        if not self.comes:
            raise RuntimeError("Operation timed out!")
        self.values.fill_(7.0)
        self.done = True


@pytest.mark.parametrize("comes", [True, False])
def test_what_is_still_written(site: Any, monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    """By an operation of a process group: it is waited for, and what isn't done then keeps the role awake."""
    model = Model()
    add(site, model)
    sleeper = Sleeper(site)
    monkeypatch.setattr(torch_works, "pending", lambda: [Summing(model.cache, comes)])
    outcome = sleeper.sleep("model", TAGS, (), 1)
    assert (outcome.refusal is None) is comes
    assert sleeper.asleep.tags("model") == (TAGS if comes else ())
    if comes:
        sleeper.wake("model", TAGS, 1, {})
        assert (model.cache == 7.0).all()
        sleeper.space.close()


@pytest.mark.parametrize(("writes", "of_file"), [(True, 2), (False, 5)])
def test_how_it_comes_back(site: Any, writes: bool, of_file: int) -> None:
    """What is about to be written is memory of the process's own; all else stays pages of the file."""
    model = Model()
    role = add(site, model)
    before = [piece.clone() for piece in model.pieces()]
    sleeper = Sleeper(site)
    try:
        for _ in range(2):
            assert sleeper.sleep_alone("model") == pytest.approx(5 * PIECE, rel=0.02)
            assert sleeper.in_files().pages == 0
            assert sleeper.wake_alone(role, writes=writes) == pytest.approx(5 * PIECE, rel=0.02)
            assert sleeper.in_files().pages == pytest.approx(of_file * PIECE, rel=0.02)
            assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))
        model.train()
    finally:
        sleeper.space.close()


@pytest.mark.parametrize("alone", [False, True])
def test_what_malloc_holds_makes_room(site: Any, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """It is given back where memory that wakes would have none otherwise."""
    role = add(site, Model())
    sleeper = Sleeper(site)
    sleeper.sleep("model", TAGS, (), 1)
    free, given_back = 4 * PIECE, []
    sleeper.free = lambda: free + sum(given_back)
    monkeypatch.setattr("colocate.worker.sleeping.trim", lambda: given_back.append(2 * PIECE))
    try:
        for _ in range(2):
            if alone:
                sleeper.wake_alone(role)
            else:
                assert sleeper.wake("model", TAGS, 1, {}).refusal is None
            assert given_back == [2 * PIECE]
            sleeper.sleep_alone("model")
    finally:
        sleeper.space.close()


def test_discard(site: Any) -> None:
    """What nobody needs takes no room on the disk, and is zeros to its last byte, small pieces too."""
    model = Model()
    small = model.small = torch.ones(3)  # type: ignore[attr-defined]
    role = add(site, model)
    weight, grad, state, frozen, cache = model.pieces()
    kept = [each.clone() for each in (weight, state, frozen)]
    places = [each.data_ptr() for each in model.pieces()]
    sleeper = Sleeper(site)
    try:
        assert sleeper.sleep("model", TAGS, ("grads", "cache"), 1).nbytes == pytest.approx(5 * PIECE, rel=0.02)
        assert sleeper.space._files is not None
        assert sleeper.space._files.room() == pytest.approx(3 * PIECE, rel=0.02)
        sleeper.free = lambda: 4 * PIECE
        refused = sleeper.wake("model", TAGS, 1, {})
        assert (refused.own, refused.fits) == (True, False)  # it may be written into, which takes memory then
        sleeper.free = lambda: 6 * PIECE
        assert sleeper.wake("model", TAGS, 1, {}).nbytes == pytest.approx(5 * PIECE, rel=0.02)
        assert all(torch.equal(one, other) for one, other in zip((weight, state, frozen), kept, strict=True))
        assert not any(each.any() for each in (grad, cache, small))
        assert places == [each.data_ptr() for each in model.pieces()]
        model.train()
        before = [each.clone() for each in model.pieces()]
        sleeper.sleep("model", TAGS, (), 1)
        sleeper.wake_alone(role)
        assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))
    finally:
        sleeper.space.close()


@pytest.mark.parametrize("lost", [False, True])
def test_discard_of_what_a_backward_pass_needs(site: Any, lost: bool) -> None:
    """Autograd has saved a cache, whose contents are gone: that is an error, and no gradients of zeros."""
    model = Model()
    role = add(site, model)
    weight = torch.ones_like(model.cache, requires_grad=True)
    loss = (weight * model.cache).sum()
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, ("cache",) if lost else (), 1)
        sleeper.wake_alone(role)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") if lost else nullcontext():
            loss.backward()
        assert (weight.grad is None) == lost
    finally:
        sleeper.space.close()


def test_discard_of_what_sleeps(site: Any) -> None:
    """It is zeros, whether it came from the file or not, and takes no room there any more."""
    model = Model()
    role = add(site, model)
    sleeper = Sleeper(site)
    try:
        for writes in (False, True):
            model.cache += 1
            sleeper.sleep_alone("model")
            assert sleeper.space._files is not None
            assert sleeper.space._files.room() == pytest.approx(5 * PIECE, rel=0.02)
            assert sleeper.sleep("model", TAGS, ("cache",), 1).nbytes == 0
            assert sleeper.space._files.room() == pytest.approx(4 * PIECE, rel=0.02)
            assert sleeper.asleep.emptied == {model.cache.data_ptr()}
            sleeper.wake_alone(role, writes=writes)
            assert not model.cache.any()
            assert model.net.weight.grad.any()
    finally:
        sleeper.space.close()


def test_discard_of_what_has_slept(site: Any) -> None:
    """What was copied back for a step, whose place in the file is kept for the next time, takes no room there."""
    model = Model()
    role = add(site, model)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep_alone("model")
        sleeper.wake_alone(role)
        model.train()
        kept = [each.clone() for each in model.pieces()]
        sleeper.sleep("model", TAGS, ("grads", "cache"), 1)
        assert sleeper.space._files is not None
        assert sleeper.space._files.room() == pytest.approx(3 * PIECE, rel=0.02)
        sleeper.wake_alone(role)
        weight, grad, state, frozen, cache = model.pieces()
        assert all(torch.equal(one, kept[at]) for at, one in ((0, weight), (2, state), (3, frozen)))
        assert not any(each.any() for each in (grad, cache))
    finally:
        sleeper.space.close()


def test_discard_needs_no_disk(site: Any) -> None:
    """Nothing is written."""
    site.spill_dir = "/dev/shm"
    model = Model()
    role = add(site, model)
    sleeper = Sleeper(site)
    assert sleeper.sleep("model", ("grads",), ("grads",), 1).nbytes == pytest.approx(PIECE, rel=0.02)
    refused = sleeper.sleep("model", TAGS, ("grads",), 1)
    assert "/dev/shm is a tmpfs" in (refused.refusal or "")
    sleeper.wake_alone(role)
    assert not model.net.weight.grad.any()
    assert model.cache.all()


@pytest.mark.parametrize(
    ("named", "device", "in_turns", "refused"),
    [
        ("/dev/shm", "cpu", False, True),
        ("/dev/shm", "cuda:0", False, True),
        (None, "cpu", True, True),
        (None, "cpu", False, False),  # perhaps nothing will ever sleep
        (None, "cuda:0", True, False),  # what does goes to the host's memory
    ],
)
def test_a_place_for_what_will_sleep(
    named: str | None, device: str, in_turns: bool, refused: bool, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That there is none shows before a role is constructed, where one was named or is needed for sure."""
    monkeypatch.setattr(pages, "spill_directories", lambda wanted: [wanted or "/dev/shm"])
    site.spill_dir, site.boot.device = named, device
    sleeper = Sleeper(site)
    with pytest.raises(ConfigError, match=r"/dev/shm is a tmpfs.*spill_dir") if refused else nullcontext():
        sleeper.begin(in_turns)
    sleeper.space.close()


def test_discard_of_arrays(site: Any) -> None:
    """Of numbers, in memory of their own: not of objects, in memory that is somebody else's, or that is shared.

    Likewise tensors, which may be made of such arrays.
    """
    source = bytes(range(256)) * 1024
    message = bytearray(source)
    shared = torch.ones(SIDE, SIDE).share_memory_()
    assert shared.untyped_storage().resizable()
    numbers = np.ones(SIDE)
    role = types.SimpleNamespace(
        numbers=numbers,
        objects=np.array([object() for _ in range(20_000)], dtype=object),
        parts=np.frombuffer(source, dtype=np.uint8),
        shared=shared,
        received=torch.frombuffer(message, dtype=torch.uint8),
        same=np.frombuffer(message, dtype=np.uint8),
        made=torch.from_numpy(np.ones(SIDE)),  # which isn't known to be the array's only use
        part_of_numbers=torch.from_numpy(numbers[1024:]),
    )
    role.view = role.numbers[3:]
    hosted = add(site, role)
    before = list(role.objects)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, ("cache",), 1)
        assert sleeper.asleep.emptied == {role.numbers.ctypes.data}
        sleeper.wake_alone(hosted)
        assert not role.view.any()
        assert not role.part_of_numbers.any()
        assert role.made.all()
        assert message == source
        assert list(role.objects) == before
        assert (role.parts[:256] == np.arange(256)).all()
        assert shared.all()
    finally:
        sleeper.space.close()
        del role.shared, shared


def test_discard_of_memory_that_weights_lie_in(site: Any) -> None:
    """Also where it is another storage for torch: weights are what they were."""
    memory = np.ones(SIDE * SIDE + 8, dtype=np.float32)
    net = torch.nn.Linear(SIDE, SIDE // 2, bias=False)
    net.weight.data = torch.from_numpy(memory[8 : SIDE * SIDE // 2 + 8]).view(SIDE // 2, SIDE)
    hosted = add(site, types.SimpleNamespace(net=net, memory=memory, other=torch.ones(SIDE, SIDE)))
    assert net.weight.untyped_storage().data_ptr() != memory.ctypes.data
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, ("cache",), 1)
        sleeper.wake_alone(hosted)
        assert net.weight.all()
        assert memory.all()
        assert not hosted.instance.other.any()
    finally:
        sleeper.space.close()


def made_of_others() -> dict[str, Any]:
    """Sparse tensors of each layout, and jagged ones, of what isn't zero."""
    dense = torch.eye(200)
    jagged = [
        torch.nested.nested_tensor([torch.ones(5), torch.ones(7)], layout=torch.jagged, requires_grad=each)
        for each in (False, True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are in a beta state
        compressed = {"csr": dense.to_sparse_csr(), "csc": dense.to_sparse_csc(), "bsr": dense.to_sparse_bsr((2, 2))}
    return {"coo": dense.to_sparse(), **compressed, "jagged": jagged[0], "trained": jagged[1]}


def test_discard_of_tensors_that_are_made_of_others(site: Any) -> None:
    """Their values are lost, as others are; what says where these are isn't, also where the role has that itself."""
    found = made_of_others()
    role = types.SimpleNamespace(**found, columns=found["csr"].col_indices())
    columns, rows = role.columns.clone(), role.coo._indices().clone()
    shapes = [each.shape for each in role.jagged.unbind()]
    hosted = add(site, role)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, ("cache",), 1)
        sleeper.wake_alone(hosted)
        assert torch.equal(role.columns, columns)
        assert torch.equal(role.coo._indices(), rows)
        assert not role.coo._values().any()
        for layout in ("csr", "csc", "bsr"):
            assert not getattr(role, layout).values().any()
            assert torch.equal(getattr(role, layout).to_dense(), torch.zeros(200, 200))
        assert [each.shape for each in role.jagged.unbind()] == shapes
        assert not role.jagged.values().any()
        assert role.trained.values().all()
    finally:
        sleeper.space.close()


def test_discard_of_what_numpy_has_seen(site: Any) -> None:
    """Torch doesn't know then whose it is: a cache stays as it was. Gradients, to which the next step adds, don't."""
    model = Model()
    role = add(site, model)
    for each in model.pieces():
        each.numpy()
    assert not model.net.weight.grad.untyped_storage().resizable()
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, ("grads", "cache"), 1)
        sleeper.wake_alone(role)
        assert not model.net.weight.grad.any()
        assert model.cache.all()
    finally:
        sleeper.space.close()


@pytest.mark.parametrize("kind", ["declared", "made of a part"])
def test_discard_of_what_requires_gradients(site: Any, kind: str) -> None:
    """Whatever else has that memory: another kind of what is discarded, or an array that it was made of."""
    memory = np.ones(SIDE * SIDE, dtype=np.float32)
    weight = torch.ones(SIDE * SIDE) if kind == "declared" else torch.from_numpy(memory[1024:])
    role = types.SimpleNamespace(weight=weight.requires_grad_(), memory=memory, other=torch.ones(SIDE, SIDE))
    if kind == "declared":
        role.device_state = lambda: [weight.detach()]
    hosted = add(site, role)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, ("cache",), 1)
        sleeper.wake_alone(hosted)
        assert weight.all()
        assert memory.all() == (kind == "made of a part")
        assert not role.other.any()
    finally:
        sleeper.space.close()


def test_discard_of_more_than_can_be_looked_at(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may need it: nothing is lost. To be copied it needn't be known."""
    model = Model()
    role = add(site, model)
    before = [each.clone() for each in model.pieces()]
    monkeypatch.setattr(holdings, "_LOOKS", 4)
    sleeper = Sleeper(site)
    try:
        refused = sleeper.sleep("model", TAGS, ("grads",), 1).refusal or ""
        assert "holds more objects than were looked at: what else uses the memory isn't known" in refused
        assert sleeper.sleep("model", TAGS, (), 1).nbytes
        sleeper.wake_alone(role)
        assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))
    finally:
        sleeper.space.close()


def test_discard_without_room_in_the_tables(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found before anything has changed."""
    model = Model()
    add(site, model)
    before = [each.clone() for each in model.pieces()]
    sleeper = Sleeper(site)
    with monkeypatch.context() as patch:
        patch.setattr(mappings, "most_mappings", lambda: len(mappings.mappings_now()))
        outcome = sleeper.sleep("model", ("grads",), ("grads",), 1)
    assert "vm.max_map_count" in (outcome.refusal or "")
    assert not outcome.fits
    assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_memory_that_is_let_go_of_while_it_sleeps(site: Any, kind: str) -> None:
    """What lies there afterwards, the role's or another one's, is awake, and can sleep; what wakes then is the rest."""
    region = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def made() -> Any:
        return torch.frombuffer(region, dtype=torch.uint8) if kind == "tensor" else np.frombuffer(region, np.uint8)

    role, other = types.SimpleNamespace(cache=made(), kept=torch.ones(SIDE, SIDE)), types.SimpleNamespace(cache=None)
    hosted = add(site, role)
    site.roles["other"] = HostedRole("other", other, {}, standalone_context("other"), hosted.setting)
    sleeper = Sleeper(site)
    accounts = Accounts(site, sleeper, Gradients(site))
    try:
        assert sleeper.sleep_alone("model") == pytest.approx(2 * PIECE, rel=0.02)
        role.cache, other.cache = None, made()
        other.cache[:] = 7
        shares = accounts.look(None)
        assert shares.owned["other"] == {("tensors", "cpu"): PIECE}
        assert shares.asleep == {"model": PIECE, "other": 0}
        assert sleeper.sleep_alone("other") == pytest.approx(PIECE, rel=0.02)
        assert sleeper.wake_alone(hosted) == pytest.approx(PIECE, rel=0.02)
        assert accounts.look(None).asleep == {"model": 0, "other": PIECE}
        sleeper.wake_alone(site.roles["other"])
        assert sleeper.asleep.away == {}
        assert (other.cache == 7).all()
        assert role.kept.all()
    finally:
        sleeper.space.close()
        other.cache = None


@pytest.mark.xfail(strict=True, reason="what was away stays pages of a file, which come again when they are let go of")
@pytest.mark.parametrize("when", ["asleep", "awake"])
def test_memory_that_another_allocator_lets_go_of(site: Any, when: str) -> None:
    """Pages that an allocator lets go of without unmapping them, as Arrow's pool does, are empty afterwards."""
    region = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    role = types.SimpleNamespace(cache=np.frombuffer(region, np.uint8))
    role.cache[:] = 7
    hosted = add(site, role)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep_alone("model")
        if when == "awake":
            sleeper.wake_alone(hosted)
        role.cache = None
        region.madvise(mmap.MADV_DONTNEED)
        assert not np.frombuffer(region, np.uint8).any()
    finally:
        sleeper.space.close()


def test_a_call_beside_what_sleeps(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that sleeps is asked for as long as nobody may have come to lie there."""
    hosted = add(site, types.SimpleNamespace(cache=torch.ones(SIDE, SIDE)))
    other = types.SimpleNamespace(small=torch.ones(5))
    site.roles["other"] = HostedRole("other", other, {}, standalone_context("other"), hosted.setting)
    sleeper = Sleeper(site)
    accounts = Accounts(site, sleeper, Gradients(site))
    asked: list[Any] = []
    freed = sleeper.asleep.freed

    def noted(among: Any = None) -> set[int]:
        asked.append(among)
        return freed(among)

    try:
        sleeper.sleep_alone("model")
        accounts.look(None)
        monkeypatch.setattr(sleeper.asleep, "freed", noted)
        shares = accounts.look("other")
        assert (shares.owned["other"], shares.asleep) == ({("tensors", "cpu"): 20}, {"model": PIECE, "other": 0})
        assert asked == []
        other.small = hosted.instance.cache  # which sleeps still
        assert accounts.look("other").asleep == {"model": PIECE, "other": 0}
        assert asked == [{other.small.data_ptr()}]
    finally:
        sleeper.space.close()


def test_what_somebody_has_a_part_of_stays(site: Any) -> None:
    """Also where that begins elsewhere, and so is another storage: who writes there meanwhile would lose it."""
    table = np.ones(SIDE * SIDE, np.float32)
    hosted = add(site, types.SimpleNamespace(table=table, own=torch.ones(SIDE, SIDE)))
    other = types.SimpleNamespace(part=torch.from_numpy(table[SIDE:]))
    site.roles["other"] = HostedRole("other", other, {}, standalone_context("other"), hosted.setting)
    sleeper = Sleeper(site)
    try:
        assert sleeper.sleep_alone("model") == pytest.approx(PIECE, rel=0.02)
        other.part.add_(1)
        assert sleeper.sleep_alone("other") == pytest.approx(PIECE, rel=0.02)  # nobody is awake who has it
        sleeper.wake_alone(hosted)
        sleeper.wake_alone(site.roles["other"])
        assert (table[:SIDE] == 1).all()
        assert (table[SIDE:] == 2).all()
    finally:
        sleeper.space.close()


def test_memory_that_is_let_go_of_while_it_moves(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays until it is where it is to be: nobody else may come to lie there meanwhile."""
    role = types.SimpleNamespace(cache=np.ones((SIDE, SIDE), np.float32))
    add(site, role)
    site.boot.worker, site.say = "worker", lambda message: None
    sleeper, prefetch, goes_on = Sleeper(site), None, threading.Event()
    try:
        gone = weakref.ref(role.cache)
        going = sleeper.going("model", TAGS)
        role.cache = None
        assert gone() is not None
        sleeper.space.copy_out(going).end()
        del going
        assert gone() is None

        role.cache = np.ones((SIDE, SIDE), np.float32)
        gone = weakref.ref(role.cache)
        sleeper.sleep_alone("model")
        coming = sleeper.asleep.coming("model", TAGS)
        bring_back = sleeper.space.bring_back

        def later(coming: Any, writes: bool) -> None:
            goes_on.wait()
            bring_back(coming, writes)

        monkeypatch.setattr(sleeper.space, "bring_back", later)
        prefetch = Prefetch(site, sleeper)
        prefetch.begin({}, "model", coming, writes=True)
        role.cache = None
        assert gone() is not None
        goes_on.set()
        prefetch.settle()
        assert gone() is None
    finally:
        goes_on.set()
        if prefetch is not None:
            prefetch.close()
        sleeper.space.close()


def test_memory_that_is_let_go_of_amid_a_wake_that_is_refused(site: Any) -> None:
    """It is there until it sleeps again, and what is told is the refusal."""
    role = types.SimpleNamespace(cache=np.ones((SIDE, SIDE), np.float32))
    add(site, role)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep_alone("model")

        def let_go_and_refuse(question: Any) -> None:
            role.cache = None
            refuse(question)

        site.ask = let_go_and_refuse
        assert sleeper.wake("model", TAGS, 1, {}).refusal == "another rank has no room"
        assert sleeper.asleep.coming("model", TAGS).size == 0
    finally:
        sleeper.space.close()


def test_memory_that_was_let_go_of_before_it_moves(site: Any) -> None:
    """Others may lie there: it is left alone."""
    role = types.SimpleNamespace(cache=np.ones((SIDE, SIDE), np.float32), kept=torch.ones(SIDE, SIDE))
    add(site, role)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep_alone("model")
        coming = sleeper.asleep.coming("model", TAGS)
        assert coming.size == pytest.approx(2 * PIECE, rel=0.02)
        role.cache = None
        coming.hold()
        assert coming.size == pytest.approx(PIECE, rel=0.02)
    finally:
        sleeper.space.close()


def test_more_pieces_than_mappings(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for which the kernel has no room are awake, and told."""
    size = 8 * mappings.PAGE
    # Not `malloc`'s: what another test had there may have been in a file.
    regions = [mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(3)]
    small = [np.frombuffer(region, np.uint8, size) for region in regions]
    add(site, types.SimpleNamespace(small=small, kept=torch.ones(SIDE, SIDE)))
    sleeper = Sleeper(site)
    monkeypatch.setattr(mappings, "most_mappings", lambda: 2 * len(mappings.mappings_now()))
    try:
        assert sleeper.sleep_alone("model") == pytest.approx(PIECE, rel=0.02)
        assert sleeper.asleep.kept_awake("model") == {moves.SMALL: 3 * size}
        assert sum(sleeper.asleep.away.values()) == PIECE
    finally:
        sleeper.space.close()


def test_a_wake_of_small_pieces_when_mappings_have_run_short(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are brought back, and don't wait in their file until somebody reads them."""
    size = 8 * mappings.PAGE
    regions = [mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(3)]
    small = [np.frombuffer(region, np.uint8, size) for region in regions]
    for number, each in enumerate(small):
        each[:] = number + 1
    role = add(site, types.SimpleNamespace(small=small))
    sleeper = Sleeper(site)
    try:
        assert sleeper.sleep_alone("model") == 3 * size
        monkeypatch.setattr(mappings, "most_mappings", lambda: len(mappings.mappings_now()))  # by others, meanwhile
        assert sleeper.wake_alone(role) == 3 * size
        places = [each.__array_interface__["data"][0] for each in small]
        assert [mappings.present_in(mappings.Area(place, place + size)) for place in places] == [size] * 3
        assert [set(each.tolist()) for each in small] == [{1}, {2}, {3}]
    finally:
        sleeper.space.close()


class Stubborn:
    """Has put away something of its own, and can't take it back at first."""

    def __init__(self) -> None:
        self.cache = torch.ones(SIDE, SIDE)
        self.refuses = True

    def sleep(self, tags: Any) -> None:
        """It goes."""

    def wake(self, tags: Any) -> None:
        """It doesn't come."""
        if self.refuses:
            raise RuntimeError("nothing comes back")


@pytest.mark.parametrize("why", ["another rank", "the device"])
def test_a_sleep_that_is_refused_takes_no_room(site: Any, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """On the disk, as often as it is tried; what sleeps already has its own."""
    model = Model()
    add(site, model)
    before = [piece.clone() for piece in model.pieces()]
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", ("cache",), (), 1)
        assert sleeper.space._files is not None
        room = sleeper.space._files.room()
        assert room == pytest.approx(PIECE, rel=0.02)
        for _ in range(3):
            with monkeypatch.context() as patch:
                if why == "another rank":
                    patch.setattr(site, "ask", refuse)
                else:
                    patch.setattr(sleeper.space.offload, "write", full)
                assert sleeper.sleep("model", TAGS, (), 1).refusal is not None
            assert sleeper.space._files.room() == room
            assert sleeper.asleep.tags("model") == ("cache",)
        assert sleeper.sleep("model", TAGS, (), 1).refusal is None
        assert sleeper.space._files.room() > 4 * PIECE
        assert sleeper.wake("model", TAGS, 1, {}).refusal is None
        assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))
    finally:
        sleeper.space.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("what", ["pages", "a device's memory"])
def test_what_can_not_go_takes_no_room(site: Any, monkeypatch: pytest.MonkeyPatch, what: str, ahead: bool) -> None:
    """It was copied, and stays: so on the disk its room is free, for what stays as a whole."""
    model = Model()
    add(site, model)
    site.boot.worker, site.say = "worker", lambda message: None
    before = [piece.clone() for piece in model.pieces()]
    sleeper = Sleeper(site)
    prefetch = Prefetch(site, sleeper)

    def fail(self: Any, *args: Any) -> None:
        raise OSError("no more")

    def put_to_sleep() -> set[str]:
        if not ahead:
            with pytest.raises(OSError, match="no more"):
                sleeper.sleep_alone("model", ("cache",))
            return {"model"}
        coming = sleeper.asleep.coming("model", ("weights",))
        prefetch.begin({"model": sleeper.going("model", ("cache",))}, "model", coming, writes=False)
        return prefetch.settle()

    try:
        sleeper.sleep_alone("model", ("weights",))
        assert sleeper.space._files is not None
        room = sleeper.space._files.room()
        with monkeypatch.context() as patch:
            patch.setattr(*((pages.Written, "put_away") if what == "pages" else (Offloading, "put_away")), fail)
            assert put_to_sleep() == {"model"}
        # Those that went before the device couldn't have their place, until they are freed.
        assert sleeper.space._files.room() == pytest.approx(room if what == "pages" else room + PIECE, rel=0.02)
        assert "cache" not in sleeper.asleep.tags("model")
        model.cache = torch.ones(SIDE, SIDE)
        sleeper.wake_alone(site.roles["model"])
        assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))
    finally:
        prefetch.close()
        sleeper.space.close()


def test_a_turn_that_can_not_be_undone(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the role has put away by its own means sleeps, and comes when the role is woken."""
    role = add(site, Stubborn())
    sleeper = Sleeper(site)

    class Copied:
        def end(self) -> int:
            raise OSError("no more")

    monkeypatch.setattr(sleeper.space, "copy_out", lambda going, again: Copied())
    with pytest.raises(OSError, match="no more") as caught:
        sleeper.sleep_alone("model")
    assert caught.value.__notes__ == ["then its wake() raised RuntimeError: nothing comes back"]
    assert sleeper.asleep.tags("model") == TAGS
    role.instance.refuses = False
    assert sleeper.wake_alone(role) == 0
    assert sleeper.asleep.tags("model") == ()


def test_a_wake_that_is_refused_and_can_not_be_undone(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is told, and what of it isn't as it was; the role wakes the next time."""
    model = Model()
    add(site, model)
    before = [piece.clone() for piece in model.pieces()]
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, (), 1)
        with monkeypatch.context() as patch:
            patch.setattr(site, "ask", refuse)
            patch.setattr(sleeper.space, "put_back", full)
            outcome = sleeper.wake("model", TAGS, 1, {})
        assert outcome.refusal == "another rank has no room"
        assert "has no room where it was" in (outcome.left or "")
        assert sleeper.wake("model", TAGS, 1, {}).refusal is None
        assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))
    finally:
        sleeper.space.close()


def refuse(question: Any) -> None:
    """As the driver does when a rank can't."""
    raise ColocateError("another rank has no room")


def full(*_: Any) -> None:
    """As a disk that others have filled meanwhile."""
    raise OSError(28, "No space left on device")


def test_a_hook_that_is_a_generator(site: Any) -> None:
    """Nothing of it would run."""

    class Engine:
        def sleep(self, tags: Any) -> Any:
            yield tags

    add(site, Engine())
    outcome = Sleeper(site).sleep("model", TAGS, (), 1)
    assert "sleep() is a generator" in (outcome.refusal or "")


def test_memory_that_is_resized_while_it_sleeps(site: Any) -> None:
    """It is elsewhere then, and awake. Who comes to lie where it was hasn't slept."""
    hosted = add(site, types.SimpleNamespace(grown=torch.ones(SIDE, SIDE), kept=torch.ones(SIDE, SIDE)))
    sleeper = Sleeper(site)
    accounts = Accounts(site, sleeper, Gradients(site))
    try:
        sleeper.sleep_alone("model")
        before = hosted.instance.grown.data_ptr()
        hosted.instance.grown.untyped_storage().resize_(2 * PIECE)
        assert hosted.instance.grown.data_ptr() != before
        shares = accounts.look("model")
        assert (shares.owned["model"], shares.asleep["model"]) == ({("tensors", "cpu"): 2 * PIECE}, PIECE)
        sleeper.wake_alone(hosted)
        assert accounts.look("model").asleep["model"] == 0
        assert hosted.instance.grown.all()
        assert hosted.instance.kept.all()
    finally:
        sleeper.space.close()


class Box:
    """What a method may return."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors


@pytest.mark.parametrize("kept", ["object", "set", "module", "gradient", "many"])
def test_residents_of_any_kind(site: Any, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in them stays, also with `discard`, and counts as the residents of who has made them."""
    if kept == "many":  # they are looked through all the same
        monkeypatch.setattr(holdings, "_LOOKS", 100)
    net = torch.nn.Linear(SIDE, SIDE, bias=False)
    net(torch.ones(1, SIDE)).sum().backward()
    cache = torch.ones(SIDE, SIDE)
    values = {"object": Box([cache]), "set": {1: {cache}}, "module": net, "gradient": net.weight}
    values["many"] = [[each] for each in [*range(200), cache]]
    hosted = add(site, types.SimpleNamespace(cache=cache, net=net))
    site.store.expect(7)
    site.store.put(7, values[kept], "model.make", None)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, ("cache", "grads"), 1)
        sleeper.wake_alone(hosted)
        lost = [name for name, tensor in (("cache", cache), ("grads", net.weight.grad)) if not tensor.any()]
        assert lost == (["grads"] if kept in ("object", "set", "many") else ["cache"])
        site.roles.clear()
        assert Accounts(site, sleeper, Gradients(site)).look(None).owned["model"] == {("residents", "cpu"): PIECE}
    finally:
        sleeper.space.close()


@pytest.mark.parametrize("device", ["cpu", "other:0"])
def test_what_malloc_has_given_to_roles(site: Any, device: str) -> None:
    """What sleeps of the host's is in use for it all the same, also on a slot with another device."""
    asked: list[tuple[int, int, int]] = []

    def look(files: InFiles, owned: int, pinned: int, pieces: Any, away: dict[int, int]) -> None:
        asked.append((owned, sum(size for _, size in pieces), sum(away.values())))

    site.boot.device = device
    site.device = types.SimpleNamespace(peaks=None)
    site.process = types.SimpleNamespace(look=look)
    model = Model()
    role = add(site, model)
    sleeper = Sleeper(site)

    def gradients(leaves: Any) -> Any:
        return {"model": holdings.held_by(model)[0][Purpose.GRADIENTS]}

    try:
        ledger(site, sleeper, gradients)
        sleeper.sleep("model", TAGS, ("cache",), 1)
        ledger(site, sleeper, gradients)
        sleeper.wake_alone(role, writes=True)
        ledger(site, sleeper, gradients)
    finally:
        sleeper.space.close()
    assert [owned for owned, _, _ in asked] == [5 * PIECE, 0, 5 * PIECE]
    assert [pieces for _, pieces, _ in asked] == [5 * PIECE] * 3
    assert [away for _, _, away in asked] == [0, 5 * PIECE, 0]


def test_memory_that_is_in_files(site: Any, tmp_path: Path) -> None:
    """Weights of which the file is mapped: what was read and not written is the process's, and not private.

    What processes share stays, and counts as awake.
    """
    asked: list[tuple[InFiles, int]] = []
    site.device = types.SimpleNamespace(peaks=None)
    site.process = types.SimpleNamespace(look=lambda files, owned, *_: asked.append((files, owned)))
    np.ones((SIDE, SIDE), dtype=np.float32).tofile(tmp_path / "weights")
    weights = torch.from_file(str(tmp_path / "weights"), size=SIDE * SIDE)
    role = types.SimpleNamespace(weights=weights, shared=torch.ones(SIDE, SIDE).share_memory_())
    hosted = add(site, role)
    sleeper = Sleeper(site)
    try:
        ledger(site, sleeper, lambda leaves: {})
        weights.sum()
        ledger(site, sleeper, lambda leaves: {})
        weights[: weights.numel() // 2] = 2.0
        ledger(site, sleeper, lambda leaves: {})
        assert sleeper.sleep_alone("model") == pytest.approx(PIECE, rel=0.02)
        ledger(site, sleeper, lambda leaves: {})
        sleeper.wake_alone(hosted)
        ledger(site, sleeper, lambda leaves: {})
    finally:
        sleeper.space.close()
        del role.shared
    assert [files.pages / PIECE for files, _ in asked] == pytest.approx([1, 2, 1.5, 1, 2], abs=0.02)
    assert [files.absent / PIECE for files, _ in asked] == pytest.approx([1, 0, 0, 0, 0], abs=0.02)
    assert [owned for _, owned in asked] == [2 * PIECE, 2 * PIECE, 2 * PIECE, PIECE, 2 * PIECE]


def test_what_stays_and_is_let_go_of(site: Any) -> None:
    """It isn't told of any more."""
    model = Model()
    add(site, model)
    site.store.expect(1)
    site.store.put(1, [model.cache, model.frozen.weight.detach()], "model.make", None)
    sleeper = Sleeper(site)
    try:
        sleeper.sleep("model", TAGS, (), 1)
        assert sleeper.asleep.kept_awake("model") == {"used by residents": 2 * PIECE}
        model.cache = torch.ones(1)
        assert sleeper.asleep.kept_awake("model") == {"used by residents": 2 * PIECE}
        site.store.free([1])
        assert sleeper.asleep.kept_awake("model") == {"used by residents": PIECE}
    finally:
        sleeper.space.close()


def test_pinned_memory_stays(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slot with another device, which goes on with the pages that it has; all else of the host goes."""
    site.boot.device = "other:0"
    model = Model()
    role = add(site, model)
    before = [piece.clone() for piece in model.pieces()]
    monkeypatch.setattr(storages, "in_use", lambda device: device == "other:0" or None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is model.cache)
    sleeper = Sleeper(site)
    try:
        outcome = sleeper.sleep("model", TAGS, ("cache",), 1)
        assert outcome.nbytes == pytest.approx(4 * PIECE, rel=0.02)
        assert sleeper.asleep.kept_awake("model") == {"pinned: the device uses it by itself": PIECE}
        assert model.cache.data_ptr() not in sleeper.asleep.away
        sleeper.wake_alone(role)
        assert all(torch.equal(one, other) for one, other in zip(model.pieces(), before, strict=True))
    finally:
        sleeper.space.close()
