"""Storages that lose their memory and get it again: the host's own, which stand for a device's; and that keep theirs.

What keeps its addresses is over `vmm.c`, on a driver and an allocator that are played: whoever touches what is away
ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

torch = pytest.importorskip("torch")

from tests.unit.played import Cuda  # noqa: E402
from tests.unit.played_vmm import GRAIN, PlayedVmm  # noqa: E402
from tests.unit.played_vmm import Arena as Segments  # noqa: E402

from colocate.worker.memory import offload as offload_module  # noqa: E402
from colocate.worker.memory.offload import Arena, Offload, Resized, Room, digests, pinned  # noqa: E402

MIB = 1 << 20
SETTINGS = settings(max_examples=20, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Segments]:
    gpu = PlayedVmm(tmp_path)
    yield Segments(gpu, monkeypatch)
    gpu.end()


@pytest.fixture(params=["cpu", "other:0"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where memory is: the host's goes to a file, a device's to the host."""
    found: str = request.param
    monkeypatch.setattr(offload_module, "name_of", lambda device: found)
    return found


def storages(*tensors: Any) -> dict[int, Any]:
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


def full(*_: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.\nand more")


class Sleeps(RuleBasedStateMachine):
    """Tensors of any sizes that change, sleep, are emptied and wake in any order, also without room."""

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

    @rule(data=st.data(), once=st.booleans(), fails=st.booleans())
    def sleep(self, data: Any, once: bool, fails: bool) -> None:
        chosen, keys = self.some(data, set(range(len(self.tensors))) - self.asleep)
        copies = self.offload.write(keys, once=keys if once else ())
        if fails and self.fail_to_take(copies):
            return
        assert 0 <= self.offload.put_away(copies) <= sum(each.nbytes for each in (self.tensors[i] for i in chosen))
        self.asleep |= chosen

    def fail_to_take(self, copies: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Resized, "take", full)
            with contextlib.suppress(RuntimeError):
                self.offload.put_away(copies)
        return True

    @rule(data=st.data())
    def empty(self, data: Any) -> None:
        """Of what is awake, or away already."""
        chosen, keys = self.some(data, set(range(len(self.tensors))))
        self.offload.put_away(self.offload.write({}, keys))
        self.asleep |= chosen
        for index in chosen:
            self.values[index] = 0.0

    @rule(data=st.data(), how=st.sampled_from(["for good", "undone", "without room"]), forgets=st.booleans())
    def wake(self, data: Any, how: str, forgets: bool) -> None:
        chosen, keys = self.some(data, self.asleep)
        if how == "without room":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.offload, "_copying", full)
                with pytest.raises(MemoryError, match=r"are needed on cpu: CUDA out of memory\.$"):
                    self.offload.bring_back(keys)
            return
        self.offload.bring_back(keys)
        if how == "undone":
            self.offload.undo(keys)
            return
        self.asleep -= chosen
        self.offload.let_go([key for key in keys if forgets or self.offload._copies[key].room is None])

    @invariant()
    def what_is_awake_is_as_it_was(self) -> None:
        for index, tensor in enumerate(getattr(self, "tensors", ())):
            assert self.offload.away(tensor.untyped_storage()._cdata) is (index in self.asleep)
            if index not in self.asleep:
                assert bool((tensor == self.values[index]).all())
            else:
                self.is_away(tensor)

    def is_away(self, tensor: Any) -> None:
        assert tensor.untyped_storage().nbytes() == 0


def test_any_order(place: str) -> None:
    """What is awake has its contents, and what sleeps has no memory, whatever fails."""
    run_state_machine_as_test(Sleeps, settings=SETTINGS)


class KeptAddresses(Sleeps):
    """The same where addresses are kept: tensors are packed into segments."""

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
        return False  # what the driver doesn't let go of stays, and sleeps all the same

    def is_away(self, tensor: Any) -> None:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes

    @invariant()
    def memory_adds_up(self) -> None:
        if hasattr(self, "places"):
            assert [tensor.data_ptr() for tensor in self.tensors] == self.places
            gpu = self.segments.gpu
            absent, used = gpu.vmm.absent(0)
            assert used <= sum(self.tensors[index].nbytes for index in self.asleep)
            assert absent + gpu.state()[0] == sum(each.size for each in gpu.vmm.segments(0))

    def teardown(self) -> None:
        for segment in self.segments.gpu.vmm.segments(0):
            self.segments.gpu.free(segment.address)
        self.segments.segments.clear()


def test_what_wakes_is_in_large_pages() -> None:
    """The host's memory is asked for so: else a wake takes three times as long, for the pages alone."""
    offload, chosen = Offload("cpu"), storages(tensor := torch.ones(8 * MIB))
    offload.put_away(offload.write(chosen))
    offload.bring_back(chosen)
    assert bool((tensor == 1).all())
    at, flags, is_there = tensor.data_ptr() + 16 * MIB, "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(found[1], 16) <= at < int(found[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            flags = line
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no large pages")
    assert "hg" in flags.split()


def test_any_order_at_the_same_addresses(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is awake has its contents and its addresses, whatever sleeps beside it."""
    monkeypatch.setattr(offload_module, "name_of", lambda device: "other:0")
    KeptAddresses.segments = segments
    run_state_machine_as_test(KeptAddresses, settings=SETTINGS)


def test_others_have_the_memory_meanwhile(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake asks torch for what it has for others before it is given up; what was made later is resized."""
    monkeypatch.setattr(offload_module, "name_of", lambda device: "other:0")
    (kept,), later = segments.segment(2 * GRAIN), torch.full((1000,), 2)
    kept.fill_(3)
    offload, chosen = Offload("other:0"), storages(kept, later)
    offload.put_away(offload.write(chosen))
    segments.gpu.limit(2 * GRAIN)
    other = segments.gpu.alloc(GRAIN)
    assert other is not None
    with pytest.raises(MemoryError, match=r"KiB are needed on other:0: cuMemCreate: out of memory"):
        offload.bring_back(chosen)
    assert (segments.gpu.state()[0], later.untyped_storage().nbytes()) == (GRAIN, 0)
    segments.cached.append(other)
    offload.bring_back(chosen)
    assert bool((kept == 3).all())
    assert bool((later == 2).all())


@pytest.mark.parametrize("trains", [False, True])
def test_what_has_not_changed_is_not_copied_again(place: str, monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """A reference model's copy stays; it is seen when its weights have changed. Nobody looks at what trains."""
    weights, copied, looked = torch.randn(10_000), list[int](), list[int]()
    offload, chosen = Offload("cpu"), storages(weights)
    put, found = offload._put, digests

    def putting(storage: Any) -> Any:
        copied.append(storage.nbytes())
        return put(storage)

    def looking(views: Any) -> Any:
        looked.extend(map(len, views))
        return found(views)

    monkeypatch.setattr(offload, "_put", putting)
    monkeypatch.setattr(offload_module, "digests", looking)
    for change in (0, 0, 1):
        weights.data[77] += change
        offload.put_away(offload.write(chosen, once=chosen if trains else ()))
        offload.bring_back(chosen)
    assert len(copied) == (3 if trains else 2)
    assert len(looked) == (3 if not trains and place != "cpu" else 0)


def test_a_device_that_is_full(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sleeps makes room there, whether there is some to find out what has changed or not: all is copied then."""
    weights = torch.randn(1000)
    offload, chosen = Offload("cpu"), storages(weights)
    for is_full in (False, True, True, False):
        weights.data[77] += 1
        before = weights.clone()
        with monkeypatch.context() as patch:
            if is_full:
                patch.setattr(offload_module, "_digest", full)
            offload.put_away(offload.write(chosen))
        offload.bring_back(chosen)
        assert torch.equal(weights, before)


def test_a_copy_of_something_that_is_gone(place: str) -> None:
    """Nothing is kept for it, and who gets its place has its own; so has what has grown in place."""
    offload = Offload("cpu")
    for seed in range(20):
        weights = torch.full((1000,), float(seed))
        weights.resize_(1000 + 7 * seed).fill_(seed)
        chosen = storages(weights)
        offload.put_away(offload.write(chosen))
        offload.bring_back(chosen)
        assert bool((weights == seed).all())
        del weights, chosen
    assert len(offload._copies) <= 1


def test_an_array_of_what_sleeps() -> None:
    """It keeps the memory from coming back, which is said."""
    tensor = torch.randn(1000)
    offload, chosen = Offload("cpu"), storages(tensor)
    offload.put_away(offload.write(chosen))
    assert tensor.numpy().shape == (1000,)
    with pytest.raises(MemoryError, match="an array was made of a tensor while that slept"):
        offload.bring_back(chosen)


def test_who_computes_meanwhile_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come after what was begun before on the usual stream, which another thread uses, and hold up no more."""
    cuda, done = Cuda(monkeypatch), []
    monkeypatch.setattr(offload_module, "in_use", cuda.in_use)
    usual = cuda.current_stream()
    usual.queue.append(lambda: done.append("computed"))
    with contextlib.suppress(MemoryError), Offload("cuda:0")._copying():
        cuda.current_stream().queue.append(lambda: done.append("copied"))
        raise MemoryError("no pinned memory")
    assert done == ["computed", "copied"]
    assert not usual.queue


# -- whether something has changed


def _changes() -> Iterator[tuple[str, Any, Any]]:
    """Two tensors that differ as those of a step do, by what has been done."""
    floats, some = torch.randn(1000), torch.randn(1000)
    some[1:4:2] = -floats[1:4:2]
    yield "all signs", floats, -floats
    yield "two signs", floats, torch.cat([floats[:1], some[1:2], floats[2:3], some[3:4], floats[4:]])
    for dtype, width in ((torch.float32, 512), (torch.bfloat16, 1024), (torch.bool, 1024)):
        hot = torch.zeros(64, width, dtype=dtype)
        other = hot.clone()
        hot[3, 5] = other[4, 5] = 1
        yield f"another row of {dtype}", hot, other
    for one, two in (([5, 5, 5], [6, 3, 6]), ([0, 1, 1, 0], [1, 0, 0, 1]), ([1, 0, 3, 2, 4, 5], [0, 2, 1, 4, 3, 5])):
        yield f"{one} to {two}", torch.tensor(one), torch.tensor(two)
    yield "longer by zeros", torch.zeros(1000), torch.zeros(1002)
    large = torch.zeros(3 * MIB + 5, dtype=torch.uint8)
    yield "its last byte", large, torch.cat([large[:-1], torch.ones(1, dtype=torch.uint8)])


def test_digests() -> None:
    """Each byte and its place make a difference, also where a sum, or one of products with places, is as it was."""
    for name, *pair in _changes():
        one, two = (each.contiguous().view(-1).view(torch.uint8) for each in pair)
        first, second, again = digests([one, two, one.clone()])
        assert first == again != second, name
    assert len({*digests([torch.tensor(each).view(torch.uint8) for each in permutations(range(6))])}) == 720
    assert digests([]) == []


# -- where copies are


def test_pieces_that_come_and_go() -> None:
    """Each has its own, and there is no more than was needed at once, but for what regions are rounded up by."""
    arena = Arena(lambda nbytes: pinned(nbytes, "cpu"))
    draw = random.Random(7)
    rooms: list[tuple[Room, int, int]] = []
    most = 0
    for step in range(30):
        sizes = [draw.choice([draw.randint(0, 2000), draw.randint(0, 3 * MIB)]) for _ in range(draw.randint(0, 4))]
        arena.reserve(sizes)
        for size in sizes:
            room = arena.take(size)
            for part in room.parts:
                part.fill_(step)
            rooms.append((room, size, step))
        most = max(most, sum(-(-size // offload_module.GRAIN) * offload_module.GRAIN for _, size, _ in rooms))
        assert most <= arena.nbytes < most + (len(arena._regions) + 1) * 2 * MIB
        for room, size, number in rooms:
            assert sum(part.numel() for part in room.parts) == size
            assert all(bool((part == number).all()) for part in room.parts)
        draw.shuffle(rooms)
        del rooms[draw.randint(0, 5) :]
    rooms.clear()
    del room
    assert arena.reserve([]) == arena.nbytes


def test_copies_that_might_serve_again_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of what is awake, where the host has no more; those that this sleep needs stay."""
    monkeypatch.setattr(offload_module, "name_of", lambda device: "other:0")
    offload = Offload("cpu", lambda: 8 * MIB - offload.pinned)
    frozen, trained = torch.ones(2 * MIB), torch.ones(2 * MIB)
    for tensor in (frozen, trained, frozen):
        offload.put_away(offload.write(storages(tensor)))
        offload.bring_back(storages(tensor))
        assert bool((tensor == 1).all())
    with pytest.raises(MemoryError, match=r"8 MiB .* to be pinned, beside the 8 MiB that are: 0 B are free"):
        offload.write(storages(frozen, trained))
    offload.close()
    assert offload.pinned == 0


class Played:
    """Plays the driver."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        self.now[address] = nbytes

    def unpin(self, address: int) -> None:
        assert ctypes.c_ubyte.from_address(address).value == 0  # it is still there
        del self.now[address]


def test_pinned_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whom it may be."""
    played = Played()
    monkeypatch.setattr(offload_module, "driver", lambda device: played)
    monkeypatch.setattr(offload_module, "in_use", lambda device: torch)
    arena = Arena(lambda nbytes: pinned(nbytes, "cuda:0"))
    arena.reserve([9 * MIB])
    room = arena.take(9 * MIB)
    assert list(played.now.values()) == [10 * MIB]
    (part,) = room.parts
    del arena, room
    gc.collect()
    assert played.now
    del part
    assert not played.now


def test_where_the_driver_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has its own way; in pieces that it doesn't round up."""
    empty, sizes = torch.empty, list[int]()

    def noted(size: int, pin_memory: bool, **options: Any) -> Any:
        sizes.append(size if pin_memory else 0)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(offload_module, "driver", lambda device: None)
    monkeypatch.setattr(offload_module, "in_use", lambda device: torch)
    arena = Arena(lambda nbytes: pinned(nbytes, "cuda:0"))
    arena.reserve([21 * MIB])
    assert sizes == [16 * MIB, 4 * MIB, 2 * MIB]
    assert len(arena.take(21 * MIB).parts) == 3
    assert arena.nbytes == 0  # of the process's own


def test_in_a_process_that_is_forked() -> None:
    """It has the addresses, with zeros there, and this one has what it had."""
    pages, memory = offload_module._memory(1 << 20)
    memory.fill_(7)
    child = os.fork()
    if not child:
        os._exit(len(pages.read().strip(b"\0")) > 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.eq(7).all()
