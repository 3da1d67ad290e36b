"""Slots with a GPU: the core of the executor suite, and what only CUDA shows. Needs one NVIDIA GPU.

The slots of these tests share the machine's first GPU, so that two of them fit wherever there is one.
"""

from __future__ import annotations

import platform
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")

import colocate  # noqa: E402
from colocate import Broadcast, Concat, Gather, Role, Runtime, Scatter, method  # noqa: E402
from colocate.executor import Boot, Host, HostEvents, Node, Place  # noqa: E402
from colocate.testing.executors import Calls, Contexts, Dispatching, Failures, Residents, TensorResidents  # noqa: E402
from colocate_local.processes import LocalProcesses  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


class OneDevice(LocalProcesses):
    """Processes whose GPU is always the first one."""

    def launch(self, place: Place, boot: Boot, events: HostEvents) -> Host:
        return super().launch(attrs.evolve(place, devices=(0,)), boot, events)


class GpuRuntime(Runtime):
    """A runtime whose slots have a GPU each."""

    def reserve(self, slots: int = 1, gpus: int = 1, **options: Any) -> colocate.Pool:  # type: ignore[override]
        return super().reserve(slots, gpus, **options)


def connect(seed: int = 0, strict: bool = False) -> Runtime:
    return GpuRuntime("local", OneDevice(Node(platform.node(), None, 8)), seed, strict)


class TestCore(Calls, Dispatching, Contexts, Residents, TensorResidents, Failures):
    """The suite, on slots with a GPU."""

    def connect(self, **more: Any) -> Runtime:
        return connect(**more)


class Maker(Role):
    """Makes tensors on its device."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(4, 4).to(self.ctx.device)

    @method(dispatch=Scatter("x"), collect=Concat())
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.to(self.ctx.device))

    @method(collect=Concat())
    def make(self, rows: int) -> torch.Tensor:
        self.made = torch.arange(float(rows), device=self.ctx.device)
        return self.made

    @method(collect=Gather())
    def pointer(self) -> int:
        return self.made.data_ptr()

    @method(collect=Gather())
    def draw(self) -> list[float]:
        drawn = torch.randn(3, generator=self.ctx.generator, device=self.ctx.device)
        return [float(x) for x in drawn]

    @method(collect=Gather())
    def device(self) -> tuple[str, int]:
        return str(self.ctx.device), torch.cuda.device_count()

    @method(collect=Gather())
    def reduced(self, value: float) -> tuple[str, float]:
        group = self.ctx.process_group()
        x = torch.full((2,), value, device=self.ctx.device)
        torch.distributed.all_reduce(x, group=group)
        return torch.distributed.get_backend(group), float(x[0])


class User(Role):
    """Uses tensors that another role made."""

    @method(dispatch=Broadcast(), collect=Gather())
    def seen(self, x: torch.Tensor) -> tuple[int, str]:
        return x.data_ptr(), str(x.device)


@pytest.fixture
def group() -> Any:
    with connect() as runtime:
        yield runtime.reserve().spawn({"maker": colocate.role(Maker), "user": colocate.role(User)}, name="gpu")


def test_a_slot_sees_its_own_device_only(group: colocate.ColocatedGroup) -> None:
    assert group.role("maker", Maker).device() == [("cuda:0", 1)]


def test_a_resident_stays_where_it_is(group: colocate.ColocatedGroup) -> None:
    """Between roles of one slot it is the same memory; on the driver it arrives on the CPU."""
    maker, user = group.role("maker", Maker), group.role("user", User)
    kept = maker.make.keep(8)
    assert user.seen(kept.ref) == [(maker.pointer()[0], "cuda:0")]
    fetched = kept.fetch()
    assert fetched.is_cpu
    assert torch.equal(fetched, torch.arange(8.0))


def test_arguments_arrive_where_they_are_used(group: colocate.ColocatedGroup) -> None:
    out = group.role("maker", Maker).forward(torch.ones(6, 4))
    assert out.is_cpu
    assert out.shape == (6, 4)
    assert not out.requires_grad


def test_random_numbers_follow_from_the_seed() -> None:
    drawn = []
    for _ in range(2):
        with connect(seed=7) as runtime:
            group = runtime.reserve().spawn({"maker": colocate.role(Maker)}, name="gpu")
            drawn.append(group.role("maker", Maker).draw())
    assert drawn[0] == drawn[1]


def test_nccl_with_one_rank(group: colocate.ColocatedGroup) -> None:
    [(name, value)] = group.role("maker", Maker).reduced(3.0)
    assert name == "nccl"
    assert value == 3.0
