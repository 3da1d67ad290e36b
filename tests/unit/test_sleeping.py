"""A device's memory that sleeps: the host's own stands for it here, under another name."""

from __future__ import annotations

import contextlib
import mmap
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any, cast

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.unit.played import Captures  # noqa: E402

import colocate  # noqa: E402
from colocate import method  # noqa: E402
from colocate._calls.pending import PendingCall  # noqa: E402
from colocate._crew.sleepers import Sleepers  # noqa: E402
from colocate._role.budget import Budgets, Limit  # noqa: E402
from colocate._role.context import CallState, running_call, standalone_context  # noqa: E402
from colocate._role.role import methods_of  # noqa: E402
from colocate._views.sending import note  # noqa: E402
from colocate.errors import ColocateError, SleepingError  # noqa: E402
from colocate.executor import Boot  # noqa: E402
from colocate.worker.handed import Handed  # noqa: E402
from colocate.worker.memory import asleep as asleep_module  # noqa: E402
from colocate.worker.memory import holdings, offload, storages  # noqa: E402
from colocate.worker.memory import residency as residency_module  # noqa: E402
from colocate.worker.memory.asleep import _HANDED  # noqa: E402
from colocate.worker.memory.residency import Prefetch, Residency  # noqa: E402
from colocate.worker.memory.sleeping import Outcome, Sleeper  # noqa: E402
from colocate.worker.memory.turns import Turns  # noqa: E402
from colocate.worker.residents.store import Store  # noqa: E402
from colocate.worker.serving.hosted import HostedRole  # noqa: E402
from colocate.worker.serving.scope import Scope  # noqa: E402
from colocate.worker.torch_groups.settings import Setting, Settings  # noqa: E402

DEVICE = "other:0"
BUDGETS = Budgets((Limit("they", None, device=True, nbytes=1 << 20),), swap=True)
TAGS = ("weights", "grads", "optimizer", "cache")


class Model:
    """A role."""

    def __init__(self, net: Any = None) -> None:
        self.net = torch.nn.Linear(50, 50) if net is None else net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.cache = torch.ones(5000)
        self.array: np.ndarray | None = None

    @method
    def train(self) -> None:
        """A step."""
        self.net(torch.ones(1, 50)).sum().backward()
        self.optimizer.step()

    @method(awake=("weights",))
    def look(self) -> None:
        """Use the weights."""


class Worker:
    """One of a group of one, whose device is the other one."""

    spill_dir = None
    in_process = False
    lane: Any = types.SimpleNamespace(resumed=0, tasks=None)

    def __init__(self, boot: Boot) -> None:
        self.boot = boot
        self.setting = Setting("cpu", in_process=False)
        self.store = Store(False, Scope())
        self.roles: dict[Any, HostedRole] = {}
        self.refusal: str | None = None
        self.said: list[Any] = []

    def say(self, message: Any) -> None:
        self.said.append(message)

    def add(self, name: str, instance: Any) -> HostedRole:
        methods = methods_of(type(instance))
        self.roles[name] = HostedRole(name, instance, methods, standalone_context(name), self.setting)
        return self.roles[name]

    def ask(self, question: Any) -> None:
        reason = question.refusal or self.refusal
        if reason:
            raise ColocateError(reason)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    for module in (storages, offload):
        monkeypatch.setattr(module, "name_of", lambda device: DEVICE)
    running_call.set(CallState(1))
    return Worker(Boot("worker", "group", 0, "node", DEVICE))


def contents(model: Model) -> list[Any]:
    state = [value for values in model.optimizer.state.values() for value in values.values()]
    tensors = [*model.net.parameters(), *(each.grad for each in model.net.parameters()), model.cache, *state]
    return [tensor.detach().clone() for tensor in tensors]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(map(torch.equal, one, other))


def test_away_and_back(worker: Worker) -> None:
    """All of it is away, and comes back as it was."""
    model = Model()
    role = worker.add("model", model)
    model.train()
    before = contents(model)
    size = sum(tensor.nbytes for tensor in before)
    sleeper = Sleeper(worker)
    assert sleeper.sleep("model", TAGS, (), 1).nbytes == size
    assert sleeper.asleep.by_role() == {"model": (size, 0)}
    assert model.net.weight.untyped_storage().nbytes() == 0
    with pytest.raises(SleepingError, match=r"model\.train needs memory of its role that sleeps"):
        sleeper.check(role, role.methods["train"])
    assert sleeper.wake("model", ("weights",), 1, {}).nbytes == sum(each.nbytes for each in model.net.parameters())
    sleeper.check(role, role.methods["look"])
    with pytest.raises(SleepingError):
        sleeper.check(role, role.methods["train"])
    sleeper.wake("model", TAGS, 1, {})
    assert equal(contents(model), before)
    assert sleeper.asleep.by_role() == {}
    model.train()


def test_awake_on_this_rank_alone(worker: Worker) -> None:
    """As before the models of all ranks are renewed."""
    model = Model()
    role = worker.add("model", model)
    model.train()
    before = contents(model)
    sleeper = Sleeper(worker)
    sleeper.sleep("model", TAGS, (), 1)
    sleeper.wake_alone(role)
    assert equal(contents(model), before)
    assert sleeper.asleep.tags("model") == ()
    sleeper.wake_alone(role)  # what is awake stays so


def test_refused_by_another_rank(worker: Worker) -> None:
    """It stays awake, or asleep, as it was."""
    model = Model()
    worker.add("model", model)
    model.train()
    before = contents(model)
    sleeper = Sleeper(worker)
    worker.refusal = "rank 7: no room"
    assert sleeper.sleep("model", TAGS, (), 1).refusal == "rank 7: no room"
    assert equal(contents(model), before)
    worker.refusal = None
    sleeper.sleep("model", TAGS, (), 1)
    worker.refusal = "rank 7: no room"
    assert sleeper.wake("model", TAGS, 1, {}).refusal == "rank 7: no room"
    assert model.cache.untyped_storage().nbytes() == 0
    worker.refusal = None
    sleeper.wake("model", TAGS, 1, {})
    assert equal(contents(model), before)


def test_no_room_on_the_device(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps on, and says what is needed."""
    model = Model()
    worker.add("model", model)
    model.train()
    before = contents(model)
    sleeper = Sleeper(worker)
    sleeper.sleep("model", TAGS, (), 1)

    def full(self: offload.Offload) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(offload.Offload, "_copying", full)
        outcome = sleeper.wake("model", TAGS, 1, {})
    assert (outcome.own, outcome.fits) == (True, False)
    assert "KiB are needed on other:0: CUDA out of memory" in (outcome.refusal or "")
    assert model.cache.untyped_storage().nbytes() == 0
    sleeper.wake("model", TAGS, 1, {})
    assert equal(contents(model), before)


DISCARD = ("grads", "cache")


def kept_and_lost(model: Model) -> tuple[list[Any], list[Any]]:
    """Weights and the optimizer's state; gradients and the cache."""
    found = [*map(torch.clone, contents(model))]
    count = len(list(model.net.parameters()))
    return found[:count] + found[2 * count + 1 :], found[count : 2 * count + 1]


def test_discard(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody needs isn't copied and comes back as zeros, and all else as it was; the next time all is copied."""
    model = Model()
    worker.add("model", model)
    model.train()
    kept, lost = kept_and_lost(model)
    objects = [id(each.grad) for each in model.net.parameters()]
    copied: list[int] = []
    to_host = offload.Offload._put

    def noted(self: offload.Offload, storage: Any) -> Any:
        copied.append(storage.nbytes())
        return to_host(self, storage)

    monkeypatch.setattr(offload.Offload, "_put", noted)
    sleeper = Sleeper(worker)
    size, less = (sum(each.nbytes for each in tensors) for tensors in (kept + lost, lost))
    assert sleeper.sleep("model", TAGS, DISCARD, 1).nbytes == size
    assert sleeper.asleep.by_role() == {"model": (size, less)}
    assert sum(copied) == size - less
    sleeper.wake("model", ("weights",), 1, {})
    assert sleeper.asleep.by_role()["model"][1] == less  # of which nothing is wanted yet
    sleeper.wake("model", TAGS, 1, {})
    again, zeros = kept_and_lost(model)
    assert equal(again, kept)
    assert equal(zeros, [torch.zeros_like(each) for each in lost])
    assert objects == [id(each.grad) for each in model.net.parameters()]
    assert (sleeper.asleep.by_role(), sleeper.asleep.emptied) == ({}, set())
    assert all(copy.room is not None for copy in sleeper.offload._copies.values())
    model.train()
    model.cache += 1
    kept, lost = kept_and_lost(model)
    sleeper.sleep("model", TAGS, (), 1)
    sleeper.wake("model", TAGS, 1, {})
    assert [equal(*each) for each in zip(kept_and_lost(model), (kept, lost), strict=True)] == [True, True]


def test_discard_of_what_sleeps(worker: Worker) -> None:
    """Its contents are let go of, too: whether it has slept makes no difference, nor is there a copy on the host."""
    model = Model()
    worker.add("model", model)
    model.train()
    kept, lost = kept_and_lost(model)
    sleeper = Sleeper(worker)
    sleeper.sleep("model", ("grads", "optimizer"), (), 1)
    assert sleeper.sleep("model", TAGS, ("grads",), 1).nbytes == sum(each.nbytes for each in [*kept[:2], lost[-1]])
    assert sleeper.sleep("model", TAGS, ("grads",), 1).nbytes == 0
    grads = {each.grad.untyped_storage()._cdata for each in model.net.parameters()}
    assert all(sleeper.offload._copies[key].room is None for key in grads)
    sleeper.wake("model", TAGS, 1, {})
    again, others = kept_and_lost(model)
    assert equal(again, kept)
    assert equal(others, [*(torch.zeros_like(each) for each in lost[:-1]), lost[-1]])


def test_discard_refused_by_another_rank(worker: Worker) -> None:
    """Awake nothing is lost, and asleep it is what it would have been."""
    model = Model()
    worker.add("model", model)
    model.train()
    kept, lost = kept_and_lost(model)
    sleeper = Sleeper(worker)
    sleeper.sleep("model", ("cache",), (), 1)
    worker.refusal = "rank 7: no room"
    assert sleeper.sleep("model", TAGS, DISCARD, 1).refusal == "rank 7: no room"
    worker.refusal = None
    sleeper.wake("model", TAGS, 1, {})
    assert equal(kept_and_lost(model)[1], lost)
    sleeper.sleep("model", TAGS, DISCARD, 1)
    worker.refusal = "rank 7: no room"
    assert sleeper.wake("model", TAGS, 1, {}).refusal == "rank 7: no room"
    assert model.cache.untyped_storage().nbytes() == 0
    worker.refusal = None
    assert sleeper.wake("model", TAGS, 1, {}).nbytes == sum(each.nbytes for each in kept + lost)
    again, zeros = kept_and_lost(model)
    assert equal(again, kept)
    assert not any(each.any() for each in zeros)


WHO = ("cache", "optimizer", "declared", "a role", "a role that sleeps", "declared by a role", "a resident")


@pytest.mark.parametrize("who", WHO)
def test_discard_of_what_somebody_needs(worker: Worker, who: str) -> None:
    """Contents are let go of where only what is discarded has them: nothing else of the role, and nobody else."""
    model = Model()
    worker.add("model", model)
    model.train()
    grad = model.net.weight.grad
    if who == "cache":
        model.seen = grad.view(-1)  # type: ignore[attr-defined]
    elif who == "optimizer":
        model.optimizer.state[model.net.weight]["momentum_buffer"] = grad
    elif who == "declared":
        model.device_state = lambda: [grad]  # type: ignore[attr-defined]
    elif who == "a resident":
        worker.store.expect(1)
        worker.store.put(1, grad[3:], "model.make", None)
    elif who == "declared by a role":
        worker.add("other", types.SimpleNamespace(device_state=lambda: {"grad": grad.detach()}))
    else:
        worker.add("other", types.SimpleNamespace(grad=grad.detach()))
    before, bias = grad.clone(), model.net.bias.grad
    sleeper = Sleeper(worker)
    if who == "a role that sleeps":
        sleeper.sleep("other", TAGS, (), 1)
    sleeper.sleep("model", ("grads", "optimizer"), ("grads",), 1)
    stays = who in ("a role", "declared by a role", "a resident")
    assert (grad.untyped_storage().nbytes() > 0) == stays
    users = {"a role": "role 'other'", "declared by a role": "role 'other'", "a resident": "residents"}
    assert sleeper.asleep.kept_awake("model") == ({f"used by {users[who]}": grad.nbytes} if stays else {})
    sleeper.wake("model", TAGS, 1, {})
    assert torch.equal(grad, before)
    assert not bias.any()


@pytest.mark.parametrize("kind", ["frozen", "optimized", "differentiated"])
def test_discard_of_a_cache_keeps_weights(worker: Worker, kind: str) -> None:
    """Also of a role that has them in no module."""
    role = types.SimpleNamespace(weights=torch.ones(1000), cache=torch.ones(1000))
    if kind == "frozen":
        role.weights = torch.nn.Parameter(role.weights, requires_grad=False)
    elif kind == "optimized":
        role.optimizer = torch.optim.SGD([role.weights], lr=0.1)
    else:
        role.weights.requires_grad_()
    worker.add("model", role)
    sleeper = Sleeper(worker)
    sleeper.sleep("model", TAGS, DISCARD, 1)
    sleeper.wake("model", TAGS, 1, {})
    assert role.weights.all()
    assert not role.cache.any()


def test_discard_of_all_that_has_it(worker: Worker) -> None:
    """Gradients that the role has among its other tensors, too."""
    model = Model()
    worker.add("model", model)
    model.train()
    model.seen = model.net.weight.grad  # type: ignore[attr-defined]
    sleeper = Sleeper(worker)
    sleeper.sleep("model", TAGS, DISCARD, 1)
    sleeper.wake("model", TAGS, 1, {})
    assert not model.net.weight.grad.any()


def test_a_hook_that_frees_memory(worker: Worker) -> None:
    """It isn't looked at afterwards; and the role is told when it comes to nothing."""
    model, told = Model(), []

    def sleep(tags: tuple[str, ...]) -> None:
        told.append(("sleep", tags))
        model.cache = torch.ones(0)

    model.sleep, model.wake = sleep, lambda tags: told.append(("wake", tags))  # type: ignore[attr-defined]
    worker.add("model", model)
    sleeper = Sleeper(worker)
    sleeper.refuse_more = lambda role, nbytes, device, wakes: worker.ask(types.SimpleNamespace(refusal="no room"))
    assert "no room" in (sleeper.sleep("model", TAGS, ("cache",), 1).refusal or "")
    assert told == [("sleep", TAGS), ("wake", TAGS)]
    sleeper.refuse_more = lambda role, nbytes, device, wakes: None
    weights = sum(each.nbytes for each in model.net.parameters())
    assert sleeper.sleep("model", TAGS, ("cache",), 1).nbytes == weights
    assert sleeper.sleep("model", TAGS, ("cache",), 1).nbytes == 0
    assert len(told) == 3


def test_a_sibling_that_is_kept(worker: Worker) -> None:
    """A role that keeps another one's object might use its memory: its calls fail while that sleeps."""
    model, other = Model(), types.SimpleNamespace(sibling=None)
    worker.add("model", model)
    hosted = worker.add("other", other)
    hosted.ctx._asked.add("model")
    train, sleeper = methods_of(Model)["train"], Sleeper(worker)
    try:
        sleeper.sleep_alone("model")
        sleeper.check(hosted, train)
        other.sibling = [model]
        with pytest.raises(SleepingError, match=r"train might use role 'model', of which memory sleeps \(weights"):
            sleeper.check(hosted, train)
        sleeper.wake_alone(worker.roles["model"])
        sleeper.check(hosted, train)
    finally:
        sleeper.offload.close()


def test_what_somebody_uses_stays(worker: Worker) -> None:
    """Another role, which is awake, or a resident: nothing that is used loses its memory."""
    model = Model()
    other = Model(model.net)
    worker.add("model", model)
    worker.add("other", other)
    model.train()
    worker.store.expect(1)
    worker.store.put(1, model.cache[3:], "model.make", None)
    sleeper = Sleeper(worker)
    sleeper.sleep("model", TAGS, (), 1)
    weights = sum(2 * each.nbytes for each in model.net.parameters())  # gradients with them
    kept = {"used by role 'other'": weights, "used by residents": model.cache.nbytes}
    assert sleeper.asleep.kept_awake("model") == kept
    assert model.net.weight.untyped_storage().nbytes() > 0
    assert sleeper.sleep("other", TAGS, (), 1).nbytes == weights + other.cache.nbytes
    assert model.net.weight.untyped_storage().nbytes() == 0
    assert sleeper.asleep.kept_awake("other") == {}
    assert sleeper.asleep.kept_awake("model") == {"used by residents": model.cache.nbytes}
    assert sleeper.wake("model", TAGS, 1, {}).nbytes > weights
    assert sleeper.asleep.kept_awake("model") == {}
    assert model.net.weight.untyped_storage().nbytes() > 0
    sleeper.wake("other", TAGS, 1, {})
    model.train()


def test_why_it_stays_is_known_as_long_as_it_does(worker: Worker) -> None:
    """Also when a role was awake for a while, as for a checkpoint, and when a wake ahead of time has found no room."""
    model = Model()
    role = worker.add("model", model)
    worker.store.expect(1)
    worker.store.put(1, [model.cache, model.net.weight.detach()], "model.make", None)
    sleeper = Sleeper(worker)
    sleeper.sleep("model", ("weights",), (), 1)
    sleeper.sleep("model", TAGS, (), 1)
    asleep, kept = sleeper.asleep, model.cache.nbytes + model.net.weight.nbytes
    assert asleep.kept_awake("model") == {"used by residents": kept}
    assert asleep.kept_awake("model", ("grads", "cache")) == {"used by residents": model.cache.nbytes}
    worker.store.free([1])
    coming = asleep.coming("model", TAGS)
    sleeper.wake_alone(role)
    assert asleep.kept_awake("model") == {}
    sleeper.sleep_alone("model", TAGS, coming)  # as it was, so that goes which has come
    assert asleep.kept_awake("model") == {"used by residents": kept}
    coming = asleep.coming("model", TAGS)
    asleep.remove("model", coming)
    asleep.add("model", coming)
    assert asleep.kept_awake("model") == {"used by residents": kept}
    sleeper.sleep("model", TAGS, (), 1)
    assert asleep.kept_awake("model") == {}
    sleeper.wake("model", TAGS, 1, {})


class Holder:
    """Of a kind that nobody looks into but who looks for memory."""

    def __init__(self, held: Any) -> None:
        self.held = held


class TestHandedOver:
    """Where slots are threads the driver, and roles of other slots, have by reference what was handed over."""

    @pytest.fixture
    def model(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A role that keeps views and a graph, and shares its weights with another one."""
        monkeypatch.setattr(asleep_module, "HANDED", Handed())
        worker.in_process = True
        model: Any = Model(torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.ReLU(), torch.nn.Linear(50, 50)))
        model.views = [model.cache[3:].view(-1, 1), model.net[0].weight.detach()[1:]]
        model.loss = model.net(torch.ones(1, 50)).exp().sum()
        model.jagged = torch.nested.nested_tensor([torch.ones(300), torch.ones(20)], layout=torch.jagged)
        worker.add("model", model)
        worker.add("other", types.SimpleNamespace(net=model.net))
        return model

    def asleep(self, worker: Worker) -> dict[str, int]:
        """What stays of the role when both sleep."""
        sleeper = Sleeper(worker)
        sleeper.sleep("other", TAGS, (), 1)
        sleeper.sleep("model", TAGS, (), 1)
        kept = sleeper.asleep.kept_awake("model")
        sleeper.wake("model", TAGS, 1, {})
        sleeper.wake("other", TAGS, 1, {})
        return kept

    def test_nothing(self, worker: Worker, model: Any) -> None:
        """All sleeps, also of what a graph has saved."""
        assert self.asleep(worker) == {}
        model.loss.backward()

    def test_a_tensor_of_their_own(self, worker: Worker, model: Any) -> None:
        """As long as they have it, or a view of it."""
        handed = [model.cache.detach(), model.net[0].bias.detach()[:7]]
        asleep_module.HANDED.note({"some": handed}, DEVICE)
        size = model.cache.nbytes + model.net[0].bias.nbytes
        assert self.asleep(worker) == {_HANDED: size}
        handed[:] = [handed[0][1:]]
        assert self.asleep(worker) == {_HANDED: model.cache.nbytes}
        del handed
        assert self.asleep(worker) == {}

    @pytest.mark.parametrize("kind", ["tensor", "jagged", "object", "module"])
    def test_the_very_tensor(self, worker: Worker, model: Any, kind: str) -> None:
        """As long as the role has it, as nobody knows who else does."""
        values = {"tensor": [model.cache], "jagged": model.jagged, "object": Holder(model.cache), "module": model.net}
        asleep_module.HANDED.note(values[kind], DEVICE)
        values.clear()
        kept = self.asleep(worker)[_HANDED]
        if kind == "module":
            assert kept == sum(each.nbytes for each in model.net.parameters())
            return
        if kind == "jagged":
            assert kept >= model.jagged.offsets().nbytes
            model.jagged = None
        else:
            assert kept == model.cache.nbytes
            model.views, model.cache = [], torch.ones(3)
        assert self.asleep(worker) == {}

    def test_what_is_gone_is_forgotten(self, worker: Worker) -> None:
        """Though many were handed over."""
        handed = Handed()
        for _ in range(3):
            values = [torch.ones(1) for _ in range(1000)]
            handed.note(values, DEVICE)
        assert len(handed._tensors) == len(handed._storages) <= 2000
        kept, very = torch.ones(1), [torch.ones(1)]
        for _ in range(3):
            handed.note([kept, very[0]], DEVICE)
            handed.note(kept.detach(), DEVICE)
        assert [len(handed._tensors[each.untyped_storage()._cdata]) for each in (kept, very[0])] == [
            2,
            1,
        ]  # the last alias, too


@pytest.mark.parametrize("discard", [(), ("cache",)])
def test_what_torch_can_not_resize_stays(worker: Worker, discard: tuple[str, ...]) -> None:
    """As what has come from another library; all else sleeps."""
    model = Model()
    model.foreign = torch.frombuffer(bytearray(b"\1" * 1000), dtype=torch.uint8)  # type: ignore[attr-defined]
    worker.add("model", model)
    sleeper = Sleeper(worker)
    size = sum(each.nbytes for each in [*model.net.parameters(), model.cache])
    for _ in range(2):
        assert sleeper.sleep("model", TAGS, discard, 1) == Outcome(nbytes=size)
        assert sleeper.asleep.kept_awake("model") == {asleep_module._FOREIGN: 1000}
        assert model.foreign.eq(1).all()
        sleeper.wake("model", TAGS, 1, {})
        assert model.foreign.eq(1).all()
        assert model.cache.any() == (not discard)


@pytest.mark.parametrize("who", ["it", "a role", "a resident"])
def test_what_another_library_has_too_stays(worker: Worker, who: str) -> None:
    """Somebody has it from there, and would go on with memory that is another one's by then."""
    model, other = Model(), types.SimpleNamespace()
    worker.add("model", model)
    worker.add("other", other)
    foreign = torch.from_dlpack(model.cache)[100:]
    if who == "a resident":
        worker.store.expect(1)
        worker.store.put(1, foreign, "model.make", None)
    else:
        (model if who == "it" else other).foreign = foreign  # type: ignore[attr-defined]
    sleeper = Sleeper(worker)
    sleeper.sleep("model", TAGS, ("cache",), 1)
    assert model.cache.untyped_storage().nbytes() == model.cache.nbytes
    assert model.cache.all()
    assert foreign.all()
    assert model.net.weight.untyped_storage().nbytes() == 0
    sleeper.wake("model", TAGS, 1, {})


@pytest.mark.parametrize("when", ["asleep", "awake"])
def test_memory_that_another_allocator_lets_go_of(worker: Worker, when: str) -> None:
    """Pages that an allocator lets go of without unmapping them, as Arrow's pool does, are empty afterwards."""
    region = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    role = types.SimpleNamespace(cache=torch.from_numpy(np.frombuffer(region, np.uint8)))
    role.cache.fill_(7)
    hosted = worker.add("model", role)
    sleeper = Sleeper(worker)
    sleeper.sleep_alone("model")
    if when == "awake":
        sleeper.wake_alone(hosted)
    assert role.cache.eq(7).all()
    role.cache = None
    region.madvise(mmap.MADV_DONTNEED)
    assert not np.frombuffer(region, np.uint8).any()


@pytest.mark.parametrize("lost", [False, True])
def test_discard_of_what_a_backward_pass_needs(worker: Worker, lost: bool) -> None:
    """It is an error then, and no wrong gradient."""
    role = types.SimpleNamespace(cache=torch.ones(1000), weights=torch.ones(1000, requires_grad=True))
    worker.add("model", role)
    loss = (role.weights * role.cache).sum()
    sleeper = Sleeper(worker)
    sleeper.sleep("model", TAGS, ("cache",) if lost else (), 1)
    sleeper.wake("model", TAGS, 1, {})
    with pytest.raises(RuntimeError, match="modified by an inplace operation") if lost else contextlib.nullcontext():
        loss.backward()
        assert role.weights.grad.eq(1).all()


def test_weights_that_stay_as_they_are_are_copied_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a reference model."""
    model = Model()
    model.net.requires_grad_(False)
    worker.add("model", model)
    copied: list[int] = []
    to_host = offload.Offload._put

    def noted(self: offload.Offload, storage: Any) -> Any:
        copied.append(storage.nbytes())
        return to_host(self, storage)

    monkeypatch.setattr(offload.Offload, "_put", noted)
    sleeper = Sleeper(worker)
    for _ in range(3):
        sleeper.sleep("model", TAGS, (), 1)
        sleeper.wake("model", TAGS, 1, {})
    assert sorted(copied) == sorted([200, 10_000, 20_000])


@pytest.mark.parametrize("name", ["model", "other"])
def test_a_role_that_can_not_say_what_it_holds(worker: Worker, name: str) -> None:
    """It may be what sleeps: nothing does."""

    def device_state() -> None:
        raise KeyError("table")

    worker.add("model", Model())
    worker.add("other", Model())
    worker.roles[name].instance.device_state = device_state
    sleeper = Sleeper(worker)
    said = (
        f"rank 0 (node {worker.roles['model'].ctx.node}): device_state() of role {name!r} has raised KeyError: 'table'"
    )
    outcome = sleeper.sleep("model", TAGS, (), 1)
    assert attrs.evolve(outcome, trace=None) == Outcome(said, own=True)
    assert outcome.trace is not None
    assert "in device_state\n" in outcome.trace
    assert outcome.trace.endswith("\nKeyError: 'table'\n")
    assert "worker/sleeping.py" not in outcome.trace
    assert sleeper.asleep.by_role() == {}


def test_more_than_can_be_looked_at(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may use it: it stays."""
    model = Model()
    worker.add("model", model)
    monkeypatch.setattr(holdings, "_LOOKS", 2)
    assert "holds more objects than were looked at" in (Sleeper(worker).sleep("model", TAGS, (), 1).refusal or "")
    assert model.cache.untyped_storage().nbytes() > 0


def test_a_wake_whose_answer_can_not_be_read() -> None:
    """The thread that hears of it raises nothing: the calls that it goes before say it, and go behind the next one."""
    sleepers = Sleepers(["actor"])

    def unreadable(call: Any, bodies: Any) -> Any:
        raise ColocateError("a module of the driver's is another one")

    call = PendingCall("wake of actor", "", "wake", [0])
    call._settle([], unreadable)
    note(types.SimpleNamespace(sleepers=sleepers), sleepers.seen("actor", TAGS), call)  # type: ignore[arg-type]
    assert sleepers.seen("actor", TAGS)


@pytest.fixture
def two(worker: Worker) -> Iterator[tuple[Sleeper, Prefetch, dict[str, list[Any]]]]:
    """One model that is awake, and another one that sleeps; what is in them."""
    models = {name: Model() for name in ("one", "two")}
    for name, model in models.items():
        worker.add(name, model)
        model.train()
    before = {name: contents(model) for name, model in models.items()}
    sleeper = Sleeper(worker)
    sleeper.sleep_alone("two")
    prefetch = Prefetch(worker, sleeper)
    yield sleeper, prefetch, before
    prefetch.close()


def test_ahead_of_time(worker: Worker, two: tuple[Sleeper, Prefetch, dict[str, list[Any]]]) -> None:
    """One goes, and the other one comes; both are told."""
    sleeper, prefetch, before = two
    prefetch.begin({"one": sleeper.going("one", TAGS)}, "two", sleeper.asleep.coming("two", TAGS))
    assert prefetch.moving == {"one", "two"}
    assert (sleeper.asleep.tags("one"), sleeper.asleep.tags("two")) == (TAGS, ())  # from now on
    assert prefetch.settle() == set()
    assert not prefetch.is_under_way
    assert [(each.role, each.asleep) for each in worker.said] == [("one", True), ("two", False)]
    assert worker.roles["one"].instance.cache.untyped_storage().nbytes() == 0
    assert equal(contents(worker.roles["two"].instance), before["two"])
    sleeper.wake_alone(worker.roles["one"])
    assert equal(contents(worker.roles["one"].instance), before["one"])


def test_ahead_of_time_amid_a_capture(
    worker: Worker, two: tuple[Sleeper, Prefetch, dict[str, list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What moves beside the lane is no part of a graph that the lane captures."""
    sleeper, prefetch, before = two
    captures = Captures()
    monkeypatch.setattr(residency_module, "beside_captures", captures.beside)
    for name in ("write", "bring_back"):
        does = getattr(sleeper.offload, name)

        def looks(*args: Any, does: Any = does, **options: Any) -> Any:
            captures.look()
            return does(*args, **options)

        monkeypatch.setattr(sleeper.offload, name, looks)
    prefetch.begin({"one": sleeper.going("one", TAGS)}, "two", sleeper.asleep.coming("two", TAGS))
    assert prefetch.settle() == set()
    assert captures.seen == [True, True]
    assert equal(contents(worker.roles["two"].instance), before["two"])


def test_what_does_not_move_ahead(worker: Worker) -> None:
    """A role of which code has to run then, or for whose memory the device would be waited for."""

    class Putting(Model):
        def sleep(self, tags: Sequence[str]) -> None: ...

    worker.add("plain", Model())
    worker.add("putting", Putting())
    worker.add("kept", Model()).keeps_addresses = True
    turns = Turns(worker, Sleeper(worker), cast("Any", types.SimpleNamespace(budgets=BUDGETS)))
    assert [name for name in worker.roles if turns.moves_ahead(name)] == ["plain"]


@pytest.mark.parametrize("sibling", [False, True])
def test_a_method_of_a_role_whose_memory_moves(
    worker: Worker, two: tuple[Sleeper, Prefetch, dict[str, list[Any]]], sibling: bool
) -> None:
    """It runs when that is where it will be, also if it needs nothing awake: it may let go of it, or write there."""
    sleeper, prefetch, _ = two
    residency = Residency(worker, sleeper, cast("Any", types.SimpleNamespace(budgets=BUDGETS, moved=lambda _: None)))
    residency.begin()
    residency._prefetch = prefetch
    prefetch.begin({"one": sleeper.going("one", TAGS)}, "two", sleeper.asleep.coming("two", TAGS))
    role = worker.add("three", Model())
    residency.enter(1, role, attrs.evolve(role.methods["look"], awake=()))
    assert prefetch.is_under_way  # it is none of those
    if sibling:
        role.ctx._asked.add("one")
    else:
        role = worker.roles["one"]
    residency.enter(2, role, attrs.evolve(role.methods["look"], awake=()))
    assert not prefetch.is_under_way


@pytest.mark.parametrize("runs", [None, "one", "two"])
def test_nothing_moves_beside_a_call_of_its_role(
    worker: Worker, two: tuple[Sleeper, Prefetch, dict[str, list[Any]]], runs: str | None
) -> None:
    """An async one that needs nothing awake, and waits for something."""
    sleeper, prefetch, _ = two
    role = worker.add("three", Model())
    shares = types.SimpleNamespace(owned={}, asleep={}, shared={})
    accounts = types.SimpleNamespace(
        budgets=BUDGETS, shares=lambda: shares, changed=lambda _: None, moved=lambda _: None
    )
    residency = Residency(worker, sleeper, cast("Any", accounts))
    residency.begin()
    residency._prefetch = prefetch
    turns: Any = residency._turns
    turns.order = types.SimpleNamespace(ahead=lambda: ("three", "two"))
    turns.choice, turns.over = lambda *_: frozenset({"one"}), lambda *_: -(10**9)
    residency._wanted["two"] = TAGS
    if runs is not None:
        residency.enter(1, worker.roles[runs], attrs.evolve(role.methods["look"], awake=()))
    residency._look_ahead("three")
    assert prefetch.is_under_way is (runs is None)
    if runs is not None:
        residency.leave(1)
        residency._look_ahead("three")
        assert prefetch.is_under_way


@pytest.mark.parametrize("how", ["as usual", "on a stream", "beside a task"])
def test_nothing_moves_beside_who_may_use_it(
    worker: Worker, two: tuple[Sleeper, Prefetch, dict[str, list[Any]]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of its own may be at work where something comes; a task may write into what goes."""
    looked: list[None] = []

    def shares() -> None:
        looked.append(None)
        raise ColocateError("it is looked for what may move")

    residency = Residency(worker, two[0], cast("Any", types.SimpleNamespace(shares=shares, budgets=BUDGETS)))
    residency.begin()
    assert residency._turns is not None
    residency._turns.order = cast("Any", types.SimpleNamespace(ahead=lambda: ("one", "two")))
    residency._wanted["two"] = TAGS
    worker.roles["one"].settings = Settings(stream="its own" if how == "on a stream" else None)
    left = types.SimpleNamespace(has_others=lambda: how == "beside a task")
    monkeypatch.setattr(worker, "lane", types.SimpleNamespace(tasks=left))
    with contextlib.suppress(ColocateError):
        residency._look_ahead("one")
    assert bool(looked) is (how == "as usual")


def test_what_trains_is_not_looked_through(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy isn't kept when `group.wake` has it be there; a cache's is, and it is seen that it is the same."""
    looked: list[int] = []
    digests = offload.digests

    def noted(views: Sequence[Any]) -> Any:
        looked.extend(view.numel() for view in views)
        return digests(views)

    monkeypatch.setattr(offload, "digests", noted)
    model = Model()
    worker.add("model", model)
    model.train()
    before, sleeper = contents(model), Sleeper(worker)
    for _ in range(2):
        sleeper.sleep("model", TAGS, (), 1)
        assert looked == [4 * 5000]  # the cache
        looked.clear()
        sleeper.wake("model", TAGS, 1, {})
        assert equal(contents(model), before)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_turn_that_writes_nothing(
    worker: Worker,
    two: tuple[Sleeper, Prefetch, dict[str, list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    """What is trained otherwise isn't copied after it, and is all the same where it has written."""
    sleeper, prefetch, before = two
    copied: list[int] = []
    to_host = sleeper.offload._put

    def noted(storage: Any) -> Any:
        copied.append(storage.nbytes())
        return to_host(storage)

    monkeypatch.setattr(sleeper.offload, "_put", noted)
    net = worker.roles["two"].instance.net
    for writes in (False, True, False):
        if ahead:
            prefetch.begin({}, "two", sleeper.asleep.coming("two", TAGS))
            prefetch.settle()
        else:
            sleeper.wake_alone(worker.roles["two"])
        if writes:
            net.weight.data[3] += 1
        before["two"] = contents(worker.roles["two"].instance)
        copied.clear()
        sleeper.sleep_alone("two")
        assert copied == ([net.weight.numel() * 4] if writes else [])
    sleeper.wake_alone(worker.roles["two"])
    assert equal(contents(worker.roles["two"].instance), before["two"])


@pytest.mark.parametrize("turns", [0, 1])
def test_ahead_of_time_without_room(
    worker: Worker, two: tuple[Sleeper, Prefetch, dict[str, list[Any]]], monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """What can't go stays, what can't come sleeps on, and each can when there is room."""
    sleeper, prefetch, before = two
    copying, left = offload.Offload._copying, [turns]

    def full(self: offload.Offload) -> Any:
        if left[0]:
            left[0] -= 1
            return copying(self)
        raise torch.OutOfMemoryError("CUDA out of memory") if turns else MemoryError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(offload.Offload, "_copying", full)
        prefetch.begin({"one": sleeper.going("one", TAGS)}, "two", sleeper.asleep.coming("two", TAGS))
        assert prefetch.settle() == (set() if turns else {"one"})
    assert sleeper.asleep.tags("one") == (TAGS if turns else ())
    assert sleeper.asleep.tags("two") == TAGS
    for name in ("one", "two"):
        sleeper.wake_alone(worker.roles[name])
        assert equal(contents(worker.roles[name].instance), before[name])


def test_ranks_of_a_machine_share_its_memory(worker: Worker) -> None:
    """Each has its part of what is free on the host, as the others sleep at the same moment."""
    model = Model()
    worker.add("model", model)
    sleeper = Sleeper(worker)
    sleeper.free = lambda: 7 << 20  # where a region of 2 MiB is pinned at least
    node = worker.boot.node
    refused = sleeper.sleep("model", TAGS, (), 1, {node: 4})
    assert refused.refusal is not None
    assert re.search("2 MiB of the host's memory are needed, to be pinned: 1.8 MiB are free", refused.refusal)
    assert sleeper.sleep("model", TAGS, (), 1, {node: 3}).refusal is None


class Fills(colocate.Role):
    """Has a tensor that grows while the role sleeps."""

    def __init__(self) -> None:
        self.seen, self.weights = torch.empty(0), torch.ones(5000)

    @method(awake=())
    def fill(self) -> None:
        """Have it grow."""
        self.seen.resize_(1000).fill_(7)

    @method
    def sums(self) -> tuple[float, float]:
        """Of both."""
        return float(self.seen.sum()), float(self.weights.sum())


def test_what_was_empty_and_grows_while_the_role_sleeps() -> None:
    """It never slept, so a wake leaves it as it is."""
    with colocate.connect("local") as runtime, runtime.reserve(1) as pool:
        group = pool.spawn({"fills": colocate.role(Fills)})
        fills = group.role("fills", Fills)
        group.sleep("fills")
        fills.fill()
        assert fills.sums() == [(7000.0, 5000.0)]
