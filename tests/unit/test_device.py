"""A worker with a device that works on its own time, which the test plays; tests/gpu has the real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, Role, method
from colocate.errors import RoleError, WorkerDied
from colocate.worker import device as devices
from colocate.worker.device import Device
from colocate.worker.settings import Setting, Settings

torch = pytest.importorskip("torch")


class Stream:
    """A stream with its own work, which the end of another stream's doesn't cover."""

    def __init__(self) -> None:
        self.begun: list[str | None] = []  # The work, by its errors.
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
    """A stand-in for `torch.cuda` and its usual stream: work ends, and fails, when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.is_capturing = False
        self.current: Any = "usual"
        self.device: Any = None
        self.segments: list[dict[str, Any]] = []
        self.looks = 0

    def current_stream(self, device: str) -> Any:
        return self if self.current == "usual" else self.current

    def default_stream(self, device: str) -> Any:
        return self

    def set_stream(self, stream: Any) -> None:
        self.current = "usual" if stream is self else stream

    def current_device(self) -> int:
        return 1

    def set_device(self, device: str) -> None:
        self.device = device

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def memory_stats_as_nested_dict(self, device: str) -> dict[str, Any]:
        return {
            "reserved_bytes": {"all": {"allocated": sum(each["total_size"] for each in self.segments), "freed": 0}},
            "segment": {"all": {"allocated": 0, "freed": 0}},  # as with expandable_segments:True
        }

    def memory_snapshot(self) -> list[dict[str, Any]]:
        self.looks += 1
        return self.segments


class Worker(Role):
    """A role that begins work on the device."""

    @method
    def begin(self, wrong: str | None = None, raises: bool = False) -> str:
        gpu: Any = devices.in_use("cpu")
        gpu.begun.append(wrong)
        if raises:
            raise ValueError("on purpose")
        return "begun"

    @method
    def unfinished(self) -> int:
        gpu: Any = devices.in_use("cpu")
        return len(gpu.begun)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    played = Gpu()
    monkeypatch.setattr(devices, "in_use", lambda name: played)
    start = devices.Device.__init__

    def start_as_gpu(device: devices.Device, name: str, in_process: bool) -> None:
        start(device, name, in_process)
        device.is_gpu = True

    monkeypatch.setattr(devices.Device, "__init__", start_as_gpu)
    return played


@pytest.fixture
def group(gpu: Gpu) -> Iterator[ColocatedGroup]:
    with colocate.connect("local") as runtime:
        yield runtime.reserve(1).spawn({"one": colocate.role(Worker), "other": colocate.role(Worker)}, name="played")


def test_call_ends_with_device_work(group: ColocatedGroup, gpu: Gpu) -> None:
    with group.pipeline():
        group.role("one", Worker).begin.submit()
        found = group.role("other", Worker).unfinished.submit()
    assert found.result() == [0]


def test_device_error_belongs_to_causing_call(group: ColocatedGroup, gpu: Gpu) -> None:
    """An error on the device belongs to the call that caused it, and later calls succeed."""
    one, other = group.role("one", Worker), group.role("other", Worker)
    with group.pipeline():
        first = one.begin.submit("misaligned address")
        second = other.begin.submit()
    error = first.exception()
    assert isinstance(error, RoleError)
    assert (error.role, error.method) == ("one", "begin")
    assert "CUDA error: misaligned address" in str(error)
    assert "during the wait for the work of one.begin" in str(error)
    assert "CUDA_LAUNCH_BLOCKING" in str(error)
    assert second.result() == other.begin() == ["begun"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_context_that_is_lost(group: ColocatedGroup, gpu: Gpu, raises: bool) -> None:
    """A call that loses the device's context fails, and the next one finds its worker dead."""
    one = group.role("one", Worker)
    with pytest.raises(RoleError, match="on purpose" if raises else "CUDA error: lost"):
        one.begin("lost", raises)
    with pytest.raises(WorkerDied) as caught:
        one.begin()
    text = str(caught.value)
    assert "this process can't use cpu any more: CUDA error: device-side assert triggered" in text
    assert "fault of colocate" not in text


def test_outputs_of_graphs(gpu: Gpu) -> None:
    """A tensor in a graph's own pool is volatile; the allocator is asked only when its memory has changed."""
    device = Device("cuda:0", in_process=False)
    mine, other = torch.ones(64), torch.ones(64)
    start = mine.untyped_storage().data_ptr()

    class OnGpu:
        device, layout, is_meta = torch.device("cuda", 0), torch.strided, False

        def __init__(self, tensor: Any) -> None:
            self.untyped_storage = tensor.untyped_storage

    assert not device.is_volatile(OnGpu(mine))
    gpu.segments += [
        {"address": start - 64, "total_size": 512, "segment_pool_id": (0, 1)},
        {"address": other.untyped_storage().data_ptr(), "total_size": 256, "segment_pool_id": (0, 0)},
    ]
    looks = gpu.looks
    for _ in range(2):
        assert device.is_volatile(OnGpu(mine))
        assert device.is_volatile(OnGpu(mine[10:]))
        assert not device.is_volatile(OnGpu(other))
        assert not device.is_volatile(mine)  # a tensor of the host
    assert gpu.looks == looks + 1


def test_an_allocator_in_the_place_of_torch_s(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an allocator that gives no snapshot, any result may be a graph's output."""

    def refuse(*_: object) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support snapshot.")

    monkeypatch.setattr(gpu, "memory_snapshot", refuse)
    assert Device("cuda:0", in_process=False).is_private(1 << 45)


def test_streams(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role computes on the stream that its constructor has left, and other roles on the usual one.

    A call ends with the work on both, whichever is current at its end.
    """
    from colocate.worker import settings

    device = Device("cuda:0", in_process=False)
    setting = Setting("cuda:0", False, device.on_stream_left)
    setting.apply_settings(setting.base)  # the device isn't in use
    monkeypatch.setattr(settings, "in_use", lambda name: gpu)
    side = Stream()
    gpu.set_stream(side)
    of_role = setting.read_settings()
    assert of_role.stream is side
    assert gpu.device is None
    for wrong in (None, "misaligned address"):
        side.begun.append(wrong)
        setting.apply_settings(setting.base)
        assert gpu.current_stream("cuda:0") is gpu
        with pytest.raises(RuntimeError, match="misaligned") if wrong else contextlib.nullcontext():
            device.finish_call("actor.step")
        assert side.begun == []
        setting.apply_settings(of_role)
        assert gpu.current_stream("cuda:0") is side
    assert (gpu.after, side.after) == ([side] * 2, [gpu] * 2)
    assert gpu.device == "cuda:0"
    gpu.is_capturing = True  # The usual stream must be no part of the role's graph.
    setting.apply_settings(Settings())
    assert gpu.current_stream("cuda:0") is gpu
    assert gpu.after == [side] * 2
