"""Offload: storages give their memory away and get it back, in host memory or at kept addresses.

The tests with kept addresses run `vmm.c` on a simulated driver and allocator: an access to absent memory ends the
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

torch = pytest.importorskip("torch")

from tests.unit.played_vmm import (  # noqa: E402
    GRAIN,
    Arena as Segments,
    PlayedVmm,
)

from colocate.features.memory import offload as offload_module  # noqa: E402
from colocate.features.memory.offload import Offload, PinnedMemory, ResizedStorages  # noqa: E402

MIB = 1 << 20
SETTINGS = settings(max_examples=20, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Segments]:
    gpu = PlayedVmm(tmp_path)
    yield Segments(gpu, monkeypatch)
    gpu.end()


@pytest.fixture(params=["cpu", "other:0"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select where memory is: host memory is offloaded to a file, device memory to the host."""
    found: str = request.param
    monkeypatch.setattr(offload_module, "get_device_name", lambda device: found)
    return found


def storages(*tensors: Any) -> dict[int, Any]:
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


def full(*_: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.\nand more")


class Sleeps(RuleBasedStateMachine):
    """A state machine: tensors of any size change, sleep, are emptied and wake in any order, also without room."""

    sizes: Any = st.integers(0, 3000)

    @initialize(data=st.data())
    def begin(self, data: Any) -> None:
        self.offload = Offload("cpu")
        self.tensors = self.made(data)
        self.values = [float(index % 100) for index, _ in enumerate(self.tensors)]
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.fill_(value)
        self.asleep: set[int] = set()

    def made(self, data: Any) -> list[Any]:
        return [torch.empty(size) for size in data.draw(st.lists(self.sizes, min_size=1, max_size=6))]

    def some(self, data: Any, among: set[int]) -> tuple[set[int], dict[int, Any]]:
        chosen: set[int] = data.draw(st.sets(st.sampled_from(sorted(among)))) if among else set()
        return chosen, storages(*(self.tensors[index] for index in chosen))

    @rule(data=st.data())
    def change(self, data: Any) -> None:
        for index in self.some(data, set(range(len(self.tensors))) - self.asleep)[0]:
            self.values[index] = (self.values[index] + 1) % 100
            self.tensors[index].data.fill_(self.values[index])

    @rule(data=st.data(), fails=st.booleans())
    def sleep(self, data: Any, fails: bool) -> None:
        chosen, keys = self.some(data, set(range(len(self.tensors))) - self.asleep)
        copies = self.offload.copy_out(keys)
        if fails and self.fail_to_take(copies):
            return
        assert (
            0 <= self.offload.offload_copies(copies) <= sum(each.nbytes for each in (self.tensors[i] for i in chosen))
        )
        self.asleep |= chosen

    def fail_to_take(self, copies: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ResizedStorages, "take_memory", full)
            with contextlib.suppress(RuntimeError):
                self.offload.offload_copies(copies)
        return True

    @rule(data=st.data())
    def empty(self, data: Any) -> None:
        """Empty tensors, whether awake or asleep."""
        chosen, keys = self.some(data, set(range(len(self.tensors))))
        self.offload.offload_copies(self.offload.copy_out({}, keys))
        self.asleep |= chosen
        for index in chosen:
            self.values[index] = 0.0

    @rule(data=st.data(), how=st.sampled_from(["for good", "undone", "without room"]))
    def wake(self, data: Any, how: str) -> None:
        chosen, keys = self.some(data, self.asleep)
        if how == "without room":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.offload, "_copying", full)
                with pytest.raises(MemoryError, match=r"are needed on cpu: CUDA out of memory\.$"):
                    self.offload.restore_storages(keys)
            return
        self.offload.restore_storages(keys)
        if how == "undone":
            self.offload.undo_restore(keys)
            return
        self.asleep -= chosen
        self.offload.forget_copies(keys)

    @invariant()
    def what_is_awake_is_as_it_was(self) -> None:
        for index, tensor in enumerate(getattr(self, "tensors", ())):
            assert self.offload.is_away(tensor.untyped_storage()._cdata) is (index in self.asleep)
            if index not in self.asleep:
                assert bool((tensor == self.values[index]).all())
            else:
                self.is_away(tensor)

    def is_away(self, tensor: Any) -> None:
        assert tensor.untyped_storage().nbytes() == 0


def test_any_order(place: str) -> None:
    """Awake tensors have their contents and sleeping ones no memory, after any failure."""
    run_state_machine_as_test(Sleeps, settings=SETTINGS)


class KeptAddresses(Sleeps):
    """The same state machine at kept addresses: tensors are packed into segments."""

    segments: Segments

    def made(self, data: Any) -> list[Any]:
        self.segments.gpu.limit(1 << 40)
        found: list[Any] = []
        blocks = st.lists(st.integers(1, 3 * GRAIN), min_size=1, max_size=6)
        for sizes in data.draw(st.lists(blocks, min_size=1, max_size=4)):
            states = {i: ("inactive", "active_allocated")[size % 2] for i, size in enumerate(sizes) if size % 5 == 0}
            made = self.segments.segment(*(-(-size // 512) * 512 for size in sizes), states=states)
            found += [each for each in made if each is not None]
        self.places = [tensor.data_ptr() for tensor in found]
        return found

    def fail_to_take(self, copies: Any) -> bool:
        return False  # memory that the driver fails to release stays, and the tensors sleep all the same

    def is_away(self, tensor: Any) -> None:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes

    @invariant()
    def memory_adds_up(self) -> None:
        if hasattr(self, "places"):
            assert [tensor.data_ptr() for tensor in self.tensors] == self.places
            gpu = self.segments.gpu
            absent, used = gpu.vmm.absent_bytes(0)
            assert used <= sum(self.tensors[index].nbytes for index in self.asleep)
            assert absent + gpu.state()[0] == sum(each.size for each in gpu.vmm.list_segments(0))

    def teardown(self) -> None:
        for segment in self.segments.gpu.vmm.list_segments(0):
            self.segments.gpu.free(segment.address)
        self.segments.segments.clear()


def test_any_order_at_the_same_addresses(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Awake tensors keep their contents and addresses, whatever sleeps beside them."""
    monkeypatch.setattr(offload_module, "get_device_name", lambda device: "other:0")
    KeptAddresses.segments = segments
    run_state_machine_as_test(KeptAddresses, settings=SETTINGS)


def test_dead_storage_leaves_no_copy(place: str) -> None:
    """A dead storage leaves no copy behind, and each new or grown storage wakes with its own contents."""
    offload = Offload("cpu")
    for seed in range(20):
        weights = torch.full((1000,), float(seed))
        weights.resize_(1000 + 7 * seed).fill_(seed)
        chosen = storages(weights)
        offload.offload_copies(offload.copy_out(chosen))
        offload.restore_storages(chosen)
        assert bool((weights == seed).all())
        del weights, chosen
    offload.copy_out({})
    assert not offload._copies


def test_sleeping_tensor_with_array_cannot_wake() -> None:
    """A tensor of which an array was made in its sleep can't wake; the error says so."""
    tensor = torch.randn(1000)
    offload, chosen = Offload("cpu"), storages(tensor)
    offload.offload_copies(offload.copy_out(chosen))
    assert tensor.numpy().shape == (1000,)
    with pytest.raises(MemoryError, match="an array was made of a tensor while that slept"):
        offload.restore_storages(chosen)


# -- where copies are


def test_a_file_that_can_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor whose spill file can't be read sleeps on, and can wake later."""
    tensor = torch.full((1000,), 7.0)
    offload, chosen = Offload("cpu"), storages(tensor)
    offload.offload_copies(offload.copy_out(chosen))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(OSError, match=r"\(spill_dir\) has lost what slept there"):
            offload.restore_storages(chosen)
    assert tensor.untyped_storage().nbytes() == 0
    offload.restore_storages(chosen)
    assert bool((tensor == 7).all())


class PinningDriver:
    """Plays the driver that pins memory."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        self.now[address] = nbytes

    def unpin(self, address: int) -> None:
        assert ctypes.c_ubyte.from_address(address).value == 0  # The memory is still mapped.
        del self.now[address]


def test_memory_stays_pinned_until_last_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays pinned until its last region is freed."""
    played = PinningDriver()
    monkeypatch.setattr(offload_module, "get_driver", lambda device: played)
    monkeypatch.setattr(offload_module, "in_use", lambda device: torch)
    kept = PinnedMemory("cuda:0", lambda: 1 << 40)
    kept.grow(9 * MIB)
    assert list(played.now.values()) == [10 * MIB]
    (part,) = kept._regions
    kept.close()
    gc.collect()
    assert played.now
    del part
    assert not played.now


def test_in_a_process_that_is_forked() -> None:
    """A forked child reads zeros in spilled pages; the parent keeps their contents."""
    pages, memory = offload_module._map_pages(1 << 20)
    memory.fill_(7)
    child = os.fork()
    if not child:
        os._exit(len(pages.read().strip(b"\0")) > 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.eq(7).all()
