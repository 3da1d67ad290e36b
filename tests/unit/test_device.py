"""What a worker makes of a device that works on its own time: by one that a test plays. tests/gpu has the real one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import colocate
from colocate import ColocatedGroup, Role, method
from colocate.errors import RoleError, WorkerDied
from colocate.gpus import in_use
from colocate.testing.executors.turns import STEP
from colocate.testing.probes.sleepers import Dozing
from colocate.worker import device as devices
from colocate.worker.device import Device
from colocate.worker.memory.sleep import Sleeper
from colocate.worker.memory.turns import Residency
from colocate.worker.torch_groups.settings import Setting, Settings

torch = pytest.importorskip("torch")

from tests.unit.played import Captures  # noqa: E402


class Stream:
    """One with work of its own, which another one's end says nothing of."""

    def __init__(self) -> None:
        self.begun: list[str | None] = []  # pieces of work, by what will be wrong with them
        self.after: list[Any] = []
        self.is_dead = False

    def wait_stream(self, other: Any) -> None:
        self.after.append(other)

    def synchronize(self) -> None:
        wrong = [each for each in self.begun if each is not None]
        self.begun.clear()
        if "lost" in wrong:
            self.is_dead = True
        if self.is_dead or wrong:
            raise torch.AcceleratorError(f"CUDA error: {wrong[0] if wrong else 'device-side assert triggered'}")


class Gpu(Stream):
    """Plays `torch.cuda`, and its usual stream: work ends, and fails, when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False
        self.current: Any = "usual"
        self.device: Any = None
        self.allocated = self.peak = 0
        self.segments: list[dict[str, Any]] = []
        self.looks = 0

    def is_initialized(self) -> bool:
        return True

    def current_stream(self, device: str) -> Any:
        return self if self.current == "usual" else self.current

    def default_stream(self, device: str) -> Any:
        return self

    def set_stream(self, stream: Any) -> None:
        self.current = "usual" if stream is self else stream

    def current_device(self) -> int:
        return 1

    def Stream(self, device: str) -> str:
        return f"another of {device}"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def set_device(self, device: str) -> None:
        self.device = device

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def reset_peak_memory_stats(self, device: str) -> None:
        self.peak = self.allocated

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def memory_stats_as_nested_dict(self, device: str) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}},
            "reserved_bytes": {"all": {"allocated": sum(each["total_size"] for each in self.segments), "freed": 0}},
            "segment": {"all": {"allocated": 0, "freed": 0}},  # as with expandable_segments:True
        }

    def memory_snapshot(self) -> list[dict[str, Any]]:
        self.looks += 1
        return self.segments


class Worker(Role):
    """Has a device do something."""

    @method
    def begin(self, wrong: str | None = None, raises: bool = False) -> str:
        gpu: Any = devices.in_use("cpu")
        gpu.begun.append(wrong)
        if raises:
            raise ValueError("on purpose")
        return "begun"

    @method
    def inference(self) -> Any:
        with torch.inference_mode():
            return torch.ones(2)

    @method
    def unfinished(self) -> int:
        gpu: Any = devices.in_use("cpu")
        return len(gpu.begun)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    played = Gpu()
    monkeypatch.setattr(devices, "in_use", lambda name: played)
    monkeypatch.setattr(devices, "works_by_itself", lambda name: True)
    return played


@pytest.fixture
def group(gpu: Gpu) -> Iterator[ColocatedGroup]:
    with colocate.connect("local") as runtime:
        yield runtime.reserve(1).spawn({"one": colocate.role(Worker), "other": colocate.role(Worker)}, name="played")


def test_a_call_ends_with_its_work(group: ColocatedGroup, gpu: Gpu) -> None:
    one, other = group.role("one", Worker), group.role("other", Worker)
    for _ in range(3):
        with group.pipeline():
            one.begin.submit()
            found = other.unfinished.submit()
        assert found.result() == [0]
    assert one.begin() == ["begun"]
    assert gpu.begun == []


def test_a_span_has_the_work(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call is told to have taken is what it took there, not how long it took to begin that."""
    told: list[colocate.CallRecord] = []
    done: list[float] = []

    class Listening:
        def colocate_call_finished(self, record: colocate.CallRecord) -> None:
            told.append(record)

    def synchronize() -> None:
        Gpu.synchronize(gpu)
        done.append(time.time())

    monkeypatch.setattr(gpu, "synchronize", synchronize)
    with colocate.connect("local") as runtime:
        runtime.observe(Listening())
        group = runtime.reserve(1).spawn({"one": colocate.role(Worker)})
        done.clear()
        group.role("one", Worker).begin()
        runtime._node.services.settle()
    ((_, start, end),) = told[0].spans
    assert start <= done[0] <= end


def test_a_call_ends_with_the_copy_of_its_result(
    group: ColocatedGroup, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is made when the method's own work is done, and whoever fetches it waits for no stream."""
    from colocate.worker import runner

    plain = runner.ordinary

    def copying(value: Any, *args: Any) -> Any:
        found = plain(value, *args)
        if found is not value:
            gpu.begun.append(None)
        return found

    monkeypatch.setattr(runner, "ordinary", copying)
    with group.pipeline():
        group.role("one", Worker).inference.submit()
        found = group.role("other", Worker).unfinished.submit()
    assert found.result() == [0]


def test_an_error_is_that_of_the_call_that_has_caused_it(group: ColocatedGroup, gpu: Gpu) -> None:
    """Not of the next one, and nothing else is wrong afterwards."""
    one, other = group.role("one", Worker), group.role("other", Worker)
    with group.pipeline():
        first = one.begin.submit("misaligned address")
        second = other.begin.submit()
    error = first.exception()
    assert isinstance(error, RoleError)
    assert (error.role, error.method) == ("one", "begin")
    assert "CUDA error: misaligned address" in str(error)
    assert "what one.begin had begun there was waited for" in str(error)
    assert "CUDA_LAUNCH_BLOCKING" in str(error)
    assert second.result() == other.begin() == ["begun"]


def test_a_call_that_fails_leaves_none_behind(group: ColocatedGroup, gpu: Gpu) -> None:
    """It has failed already: what goes wrong with what it had begun is no other call's."""
    one, other = group.role("one", Worker), group.role("other", Worker)
    with pytest.raises(RoleError, match="on purpose"):
        one.begin("misaligned address", raises=True)
    assert other.begin() == ["begun"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_context_that_is_lost(group: ColocatedGroup, gpu: Gpu, raises: bool) -> None:
    """The call fails, and then the group, which doesn't go on there."""
    one = group.role("one", Worker)
    with pytest.raises(RoleError, match="on purpose" if raises else "CUDA error: lost"):
        one.begin("lost", raises)
    with pytest.raises(WorkerDied) as caught:
        one.begin()
    text = str(caught.value)
    assert "this process can't use cpu any more: CUDA error: device-side assert triggered" in text
    assert "fault of colocate" not in text


def test_peaks(gpu: Gpu) -> None:
    """Of each method the most that it has had beyond what was there."""
    device = Device("cuda:0", in_process=False)
    gpu.take(100)
    for amount in (30, 50, 20):
        before = device.begin()
        gpu.take(amount)
        gpu.take(-amount)
        device.end("actor.step", before)
    gpu.take(1000)
    device.end("actor.step", device.begin())
    device.end("actor.soon", None)  # others ran beside it
    assert device.peaks == {"actor.step": 50}
    before = device.begin()
    gpu.take(1000)
    device.forget()
    device.end("actor.step", before)
    assert device.peaks == {"actor.step": 50}
    assert Device("cuda:0", in_process=True).peaks is None
    assert Device("cpu", in_process=False).peaks is None


def test_peaks_of_roles_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a role has asleep comes before a call's peak is watched; beside what comes meanwhile nobody knows it."""
    told: list[str] = []
    wake, begin, look = Sleeper.wake_alone, Device.begin, Residency._look_ahead
    moving: list[bool] = []

    def noted(method: Any, word: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            told.append(word)
            return method(self, *args)

        return call

    def looking(self: Residency, name: str) -> None:
        look(self, name)
        moving.append(self.is_moving)

    monkeypatch.setattr(devices, "works_by_itself", lambda name: True)
    with colocate.connect("local") as runtime:
        roles = {name: colocate.role(Dozing, 1) for name in ("one", "two", "three")}
        group = runtime.reserve(1).spawn(roles, residency="swap", device_memory="9MiB", step=STEP)
        monkeypatch.setattr(Sleeper, "wake_alone", noted(wake, "wake"))
        monkeypatch.setattr(Device, "begin", noted(begin, "begin"))
        monkeypatch.setattr(Residency, "_look_ahead", looking)
        for _ in range(4):
            for name in STEP:
                told.clear()
                group.role(name, Dozing).train()
                assert told.count("begin") == (not moving[-1])
                assert told in (["wake", "begin"], ["begin"], ["wake"], [])
    assert {*moving} == {False, True}


def test_outputs_of_graphs(gpu: Gpu) -> None:
    """What lies in a pool of a graph's own is told from what doesn't; the allocator is asked when it has changed."""
    device = Device("cuda:0", in_process=False)
    mine, other = torch.ones(64), torch.ones(64)
    start = mine.untyped_storage().data_ptr()

    class OnGpu:
        device, layout, is_meta = torch.device("cuda", 0), torch.strided, False

        def __init__(self, tensor: Any) -> None:
            self.untyped_storage = tensor.untyped_storage

    assert not device.lends(OnGpu(mine))
    gpu.segments += [
        {"address": start - 64, "total_size": 512, "segment_pool_id": (0, 1)},
        {"address": other.untyped_storage().data_ptr(), "total_size": 256, "segment_pool_id": (0, 0)},
    ]
    looks = gpu.looks
    for _ in range(3):
        assert device.lends(OnGpu(mine))
        assert device.lends(OnGpu(mine[10:]))
        assert not device.lends(OnGpu(other))
        assert not device.lends(mine)  # a tensor of the host
    assert gpu.looks == looks + 1


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "jagged"])
@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")
def test_tensors_that_consist_of_others(gpu: Gpu, kind: str) -> None:
    """They have no storage of their own. Of the devices that are here only `meta` isn't the host."""
    layout = getattr(torch, kind)
    if layout is torch.jagged:
        made = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    else:
        made = torch.eye(4).to_sparse(layout=layout)
    assert not Device("cuda:0", in_process=False).lends(made.to("meta"))


def test_an_allocator_that_does_not_tell(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any result may be a graph's output, and none fails of that: torch's word with backend:cudaMallocAsync."""

    def refuse() -> Any:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")

    monkeypatch.setattr(gpu, "memory_snapshot", refuse)
    device = Device("cuda:0", in_process=False)
    assert device.is_private(torch.ones(64).untyped_storage().data_ptr())
    assert device.is_private(1 << 45)


def test_lent_results_are_copied() -> None:
    from colocate._values.leaving import ordinary

    lent, own = torch.arange(3.0), torch.arange(2.0)
    found = ordinary({"a": [lent, own]}, lambda tensor: tensor is lent)
    lent.zero_()
    assert torch.equal(found["a"][0], torch.arange(3.0))
    assert found["a"][1] is own


def test_results_in_records() -> None:
    """Dataclasses, classes made by attrs and the like leave as what they hold does; where nothing changes, it stays."""
    from colocate._values.leaving import ordinary

    @dataclasses.dataclass(frozen=True)
    class Rollout:
        tensor: Any
        other: Any = None

    @attrs.define
    class Made:
        inner: Rollout
        again: Any = None

    class Items(UserDict[str, Any]):
        pass

    weight = torch.ones(2, requires_grad=True)
    rollout = Rollout(weight * 2, "text")
    with torch.inference_mode():
        inferred = torch.ones(2)
    lent, plain = torch.arange(3.0), Rollout(torch.ones(2))
    made = Made(rollout)
    made.again = made
    found = ordinary([made, rollout, Items(x=inferred), Rollout(lent), plain], lambda tensor: tensor is lent)
    first, second, items, copied, same = found
    assert not first.inner.tensor.requires_grad
    assert first.inner is second  # two names of one stay that
    assert (second.other, type(items)) == ("text", Items)
    assert not items["x"].is_inference()
    lent.zero_()
    assert torch.equal(copied.tensor, torch.arange(3.0))
    assert same is plain
    assert rollout.tensor.requires_grad  # the role's own stays as it is
    assert first.again is first
    assert made.again is made


def test_results_that_lead_to_themselves() -> None:
    """The role's own stays as it is, whatever is in it; tables in which nothing changes are the same ones."""
    tensordict = pytest.importorskip("tensordict")
    from colocate._values.leaving import ordinary

    @dataclasses.dataclass(eq=False)
    class Batch:
        tensor: Any
        table: Any = None
        parent: Any = None

        @property
        def nbytes(self) -> int:
            return 8

    table = tensordict.TensorDict({"x": torch.ones(2)}, [2]).lock_()
    batch, plain = Batch(torch.ones(2, requires_grad=True), table), Batch(torch.ones(2), table)
    batch.parent, plain.parent = batch, [plain]
    found = ordinary(batch)
    assert found is not batch
    assert found.parent is found
    assert not found.tensor.requires_grad
    assert found.table is table
    assert batch.tensor.requires_grad
    assert batch.parent is batch
    assert ordinary(plain) is plain
    plain.table = tensordict.TensorDict({"x": batch.tensor * 2}, [2])
    found = ordinary(plain)
    assert (found.table["x"].requires_grad, plain.table["x"].requires_grad) == (False, True)
    assert found.parent[0] is found


def test_results_in_records_of_their_own_ways() -> None:
    """No code of theirs makes the copy; what can't be copied stays as it is; so do modules, and what is too deep."""
    from colocate._values.leaving import ordinary

    @dataclasses.dataclass(frozen=True)
    class OneOnly:
        tensor: Any

        def __copy__(self) -> Any:
            return self

    @dataclasses.dataclass(slots=True)
    class Slots:
        tensor: Any
        unset: Any = dataclasses.field(init=False)

    @dataclasses.dataclass
    class Fails(Exception):
        tensor: Any

    @dataclasses.dataclass(eq=False)
    class Module(torch.nn.Module):
        weight: Any

        def __new__(cls, *_: object) -> Any:
            made = super().__new__(cls)
            torch.nn.Module.__init__(made)
            return made

    weight = torch.ones(2, requires_grad=True)
    only, slots, fails, module = OneOnly(weight), Slots(weight), Fails(weight), Module(torch.nn.Parameter(weight))
    found = ordinary([only, slots, fails, module])
    assert [each.tensor.requires_grad for each in found[:3]] == [False, False, True]
    assert not hasattr(found[1], "unset")
    assert found[3] is module
    assert isinstance(module.weight, torch.nn.Parameter)
    assert only.tensor.requires_grad
    assert slots.tensor.requires_grad
    deep: Any = OneOnly(weight)
    for _ in range(5000):
        deep = OneOnly(deep)
    assert ordinary(deep) is deep
    assert ordinary([deep, deep.tensor])[1] is deep.tensor


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role computes on the stream that its constructor has left, and others on the usual one."""
    from colocate.worker.torch_groups import settings

    gpu = Gpu()
    monkeypatch.setattr(settings, "in_use", lambda name: gpu)
    setting = Setting("cuda:0", in_process=False)
    setting.have(setting.base)
    assert gpu.device == "cuda:0"
    side = Stream()
    gpu.set_stream(side)
    of_role = setting.now()
    setting.have(setting.base)
    assert gpu.current_stream("cuda:0") is gpu
    assert gpu.after == [side]
    setting.have(of_role)
    assert gpu.current_stream("cuda:0") is side
    assert side.after == [gpu]
    assert setting.is_aside(of_role)
    assert not setting.is_aside(Settings(stream=gpu))
    assert not setting.is_aside(Settings())
    assert not setting.is_aside(None)
    gpu.is_capturing = True  # a role's graph, of which the usual stream is to be no part
    setting.have(Settings())
    assert gpu.current_stream("cuda:0") is gpu
    assert gpu.after == [side]


def test_the_first_constructor_has_the_slot_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody in its thread has used one yet: torch would begin with the first."""
    chosen: list[str] = []

    class Choosing(Role):
        def __init__(self) -> None:
            torch.cuda.set_device(f"constructed for {self.ctx.device}")

        @method
        def nothing(self) -> None:
            """A role has a method."""

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with colocate.connect("local", gpus=2, processes=False) as runtime:
        for _ in range(2):
            runtime.reserve(1, gpus=1).spawn({"choosing": colocate.role(Choosing)})
    # The first of all is torch's choice.
    assert chosen == ["constructed for cuda:0", "cuda:1", "constructed for cuda:1"]


def test_an_allocator_in_the_place_of_torch_s(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no books: no call fails of that, and any result may be a graph's output. In torch's words."""

    def refuse(*_: object) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support resetPeakStats.")

    for name in ("reset_peak_memory_stats", "memory_stats_as_nested_dict", "memory_snapshot"):
        monkeypatch.setattr(gpu, name, refuse)
    device = Device("cuda:0", in_process=False)
    device.end("actor.step", device.begin())
    assert device.peaks is None
    assert device.is_private(1 << 45)


def test_work_on_a_role_s_own_stream(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends with it as well, whichever stream is current then; and its errors are the call's."""
    from colocate.worker.torch_groups import settings

    monkeypatch.setattr(settings, "in_use", lambda name: gpu)
    device = Device("cuda:0", in_process=False)
    setting = Setting("cuda:0", False, device.leaves)
    own = Stream()
    setting.have(setting.base)
    for wrong in (None, "misaligned address"):
        setting.have(Settings(stream=own))
        gpu.current.begun.append(wrong)
        setting.have(setting.base)
        with pytest.raises(RuntimeError, match="misaligned") if wrong else contextlib.nullcontext():
            device.end("actor.step")
        assert own.begun == []
    setting.have(Settings(stream=own))
    own.begun.append("misaligned address")
    setting.have(setting.base)
    assert device.why_lost() is None
    assert own.begun == []


def test_the_first_role_s_stream_is_its_own(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its constructor is the first to use the device."""
    from colocate.worker.torch_groups import settings

    setting = Setting("cuda:0", in_process=False)
    setting.have(setting.base)  # the device isn't in use
    monkeypatch.setattr(settings, "in_use", lambda name: gpu)
    side = Stream()
    gpu.set_stream(side)
    assert setting.now().stream is side
    setting.have(setting.base)
    assert gpu.current_stream("cuda:0") is gpu


def test_copies_aside(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched while the lane computes is copied on another stream, and is no part of what it captures."""
    captures = Captures()
    monkeypatch.setattr(devices, "beside_captures", captures.beside)
    device = Device("cuda:0", in_process=False)
    for _ in range(2):
        with device.aside():
            assert gpu.current == "another of cuda:0"
            captures.look()
        assert gpu.current == "usual"
        captures.look()
    assert captures.seen == [True, False] * 2


@pytest.mark.parametrize("name", ["cpu", "meta", "cuda:0", "nonsense:1"])
def test_not_in_use(name: str) -> None:
    assert in_use(name) is None or torch.cuda.is_initialized()
