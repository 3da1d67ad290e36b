"""Memory of a GPU that keeps its addresses in a sleep (`sleep="vmm"`), with CUDA graphs. See test_gpu.py."""

from __future__ import annotations

import shutil
import threading
import time
from typing import Any

import pytest
from tests.gpu.test_gpu import DEVICE, DRY, Sleeper, connect, needs_cuda, record_naps, spawned

torch = pytest.importorskip("torch")

from tests.suite.probes.sleepers import Dozing  # noqa: E402

import colocate  # noqa: E402
from colocate import Role, method  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (DRY or torch.cuda.is_available()), reason="needs CUDA"),
    pytest.mark.skipif(not DRY and shutil.which("cc") is None, reason="needs a C compiler (cc)"),
]
WIDTH = 1024  # a layer has 4 MiB, and a bias that torch packs with others


class Graphed(Role):
    """A role with a model and a graph of its forward pass, on tensors that the constructor makes."""

    def __init__(self, mib: int) -> None:
        device = self.ctx.device
        generator = torch.Generator(device).manual_seed(1)
        self.table = torch.randn(mib * 2**20 // 8 // WIDTH, WIDTH, device=device, generator=generator)
        layers = [torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(max(1, mib // 8))]
        self.net = torch.nn.Sequential(*layers).requires_grad_(False)
        for parameter in self.net.parameters():
            parameter.normal_(std=0.03, generator=generator)
        self.x = torch.zeros(256, WIDTH, device=device)
        self.y = torch.zeros(256, WIDTH, device=device)
        self.graph: Any = None
        del generator

    def _forward(self) -> None:
        self.y.copy_(self.net(self.x + self.table.mean(0)))

    @method
    def capture(self) -> None:
        """Capture the graph, after a few rounds on a side stream, as torch requires."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads use the GPU, too
            self._forward()
            self.twice = self.y * 2  # This is in the graph's own memory.

    @method
    def replay(self, seed: int) -> torch.Tensor:
        """Replay the graph; return its outputs."""
        self.x.copy_(torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(seed)))
        self.y.fill_(-1)
        self.graph.replay()
        return torch.cat([self.y, self.twice])

    @method(awake=())
    def addresses(self) -> list[int]:
        return [each.data_ptr() for each in (*self.net.parameters(), self.table, self.x, self.y)]


class Filling(Role):
    @method
    def fill(self) -> int:
        """Fill the free memory but for 1 GiB; return the number of bytes."""
        size = torch.cuda.mem_get_info(self.ctx.device)[0] - 2**30
        self.taken = torch.full((size,), 255, dtype=torch.uint8, device=self.ctx.device)
        return size

    @method
    def give_back(self) -> None:
        del self.taken
        torch.cuda.empty_cache()


class Wasteful(Role):
    """A role that allocates much in its constructor, and keeps little."""

    def __init__(self) -> None:
        self.little = torch.full((2**20,), 3.0, device=self.ctx.device)
        torch.zeros(2**30, dtype=torch.uint8, device=self.ctx.device)

    @method
    def reserved(self) -> int:
        """Return the bytes that torch has reserved on the GPU."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.ctx.device)


class ByOthers(Role):
    """A role whose weights are made by another thread, as in transformers' loading of a model right onto a GPU."""

    def __init__(self) -> None:
        thread = threading.Thread(target=self._load)
        thread.start()
        thread.join()

    def _load(self) -> None:
        self.net = torch.nn.Linear(WIDTH, WIDTH, device=self.ctx.device)

    @method
    def nothing(self) -> None:
        """Do nothing: a role needs a method."""


class Warm(Role):
    """A role that trains a little in its constructor: a thread of autograd's makes the gradients."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(WIDTH, WIDTH, device=self.ctx.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.net(torch.ones(4, WIDTH, device=self.ctx.device)).sum().backward()
        self.optimizer.step()
        self.gradients = [each.grad for each in self.net.parameters()]

    @method
    def addresses(self) -> list[int]:
        state = [each for held in self.optimizer.state.values() for each in held.values() if each.is_cuda]
        return [each.data_ptr() for each in (*self.net.parameters(), *state)]


def taken() -> int:
    """Return the bytes of the GPU that are in use by any process."""
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


class TestAddresses:
    @needs_cuda
    def test_weights_of_other_threads_are_refused(self) -> None:
        """`sleep="vmm"` refuses weights that another thread has made, but not gradients."""
        with connect() as runtime, runtime.reserve() as pool:
            with pytest.raises(colocate.RoleStartError, match=r"4 MiB of weights and buffers on cuda:0 would"):
                pool.spawn({"one": colocate.role(ByOthers).on(sleep="vmm")}, name="others")
            group = pool.spawn({"warm": colocate.role(Warm).on(sleep="vmm")}, name="warm")
            warm = group.role("warm", Warm)
            places = warm.addresses()
            group.sleep("warm")
            assert warm.addresses() == places

    @needs_cuda
    @pytest.mark.alone
    def test_a_graph_is_replayed(self) -> None:
        """A CUDA graph replays bit for bit after its weights slept, and another role wrote to the freed memory."""
        roles = {"graphed": colocate.role(Graphed, 256).on(sleep="vmm"), "filling": colocate.role(Filling)}
        with spawned(roles) as group:
            graphed, filling = group.role("graphed", Graphed), group.role("filling", Filling)
            graphed.capture()
            before, places = [graphed.replay(seed)[0].cpu() for seed in range(3)], graphed.addresses()
            assert not torch.equal(before[0], before[1])
            for _ in range(3):
                assert group.sleep("graphed") >= 0.98 * 256 * 2**20
                filling.fill()
                filling.give_back()
                group.wake("graphed")
                assert graphed.addresses() == places
                for seed, expected in enumerate(before):
                    assert torch.equal(graphed.replay(seed)[0].cpu(), expected)
            group.sleep("graphed", ("weights",))  # The rest stays in the same segments.
            assert torch.equal(graphed.replay(1)[0].cpu(), before[1])
            group.sleep("graphed", ("cache",))
            group.sleep("graphed")
            assert torch.equal(graphed.replay(2)[0].cpu(), before[2])  # The call wakes the role.

    @needs_cuda
    @pytest.mark.alone
    def test_wake_without_room(self) -> None:
        """A wake without room fails without a change, however often, and the graph replays once there is room."""
        roles = {"graphed": colocate.role(Graphed, 2048).on(sleep="vmm"), "filling": colocate.role(Filling)}
        with spawned(roles) as group:
            graphed, filling = group.role("graphed", Graphed), group.role("filling", Filling)
            graphed.capture()
            before, places = graphed.replay(1)[0].cpu(), graphed.addresses()
            group.sleep("graphed")
            filling.fill()
            full = taken()
            for _ in range(3):
                with pytest.raises(colocate.MemoryBudgetError, match=r"are needed on cuda:0"):
                    group.wake("graphed")
                assert abs(taken() - full) < 64 * 2**20
            with pytest.raises(colocate.SleepingError, match="could not be woken"):
                graphed.replay(1)
            filling.give_back()
            assert torch.equal(graphed.replay(1)[0].cpu(), before)
            assert graphed.addresses() == places

    @needs_cuda
    @pytest.mark.parametrize("mib", [1024, 3584])
    @pytest.mark.alone
    def test_memory_is_given_back(self, record_property: Any, mib: int) -> None:
        """A sleep gives at least 98 % of a role's bytes back to the GPU, and the ledger agrees."""
        with spawned({"actor": colocate.role(Sleeper, mib).on(sleep="vmm")}) as group:
            actor = group.role("actor", Sleeper)
            actor.train()
            before, awake, (slot,) = actor.digest(), taken(), group.memory().slots
            size = slot.roles[0].total
            begin = time.perf_counter()
            assert group.sleep("actor") >= 0.98 * size
            first = time.perf_counter() - begin
            assert awake - taken() >= 0.98 * size
            (slot,) = group.memory().slots
            assert slot.gpu is not None
            assert slot.gpu["allocated"] <= 0.02 * size
            nobodys = [slot.unowned[part] for part in ("other, device", "fragmentation")]
            assert min(nobodys) >= 0
            assert sum(nobodys) <= 0.02 * size
            group.wake("actor")
            what = f"sleep and wake of {size / 2**30:.0f} GiB, addresses kept"
            record_naps(record_property, group, what, size, first)
            assert actor.digest() == before

    def test_training_goes_on(self) -> None:
        """A role that keeps its addresses trains like a usual one, between sleeps of any tags and in turns."""
        orders: list[Any] = [None, ("optimizer",), ("weights", "grads"), ("cache",), None]
        with connect() as runtime:
            roles = {"kept": colocate.role(Dozing, 8).on(sleep="vmm"), "usual": colocate.role(Dozing, 8)}
            group = runtime.reserve().spawn(roles)
            kept, usual = group.role("kept", Dozing), group.role("usual", Dozing)
            places = kept.addresses()
            for tags in orders:
                group.sleep("kept", tags)
                assert kept.train() == usual.train()
                assert DRY or kept.addresses() == places
            group.close()
            turns = runtime.reserve().spawn(roles, residency="swap", device_memory="48MiB")
            kept, usual = turns.role("kept", Dozing), turns.role("usual", Dozing)
            places = kept.addresses()
            for _ in orders:
                assert kept.train() == usual.train()
                assert DRY or kept.addresses() == places

    @needs_cuda
    def test_memory_freed_by_constructor_is_returned(self) -> None:
        """Memory that a constructor frees goes back to the GPU."""
        with connect() as runtime:
            role = colocate.role(Wasteful).on(sleep="vmm")
            wasteful = runtime.reserve().spawn({"wasteful": role}).role("wasteful", Wasteful)
            assert wasteful.reserved()[0] < 2**28
