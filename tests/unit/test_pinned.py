"""Pinned memory to which a device's goes; nothing is pinned here but by a driver that is played."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

torch = pytest.importorskip("torch")

from colocate._devices.cuda_driver import DriverError  # noqa: E402
from colocate.worker.memory import offload as offload_module  # noqa: E402
from colocate.worker.memory.offload import Arena, Offload, Room, pinned  # noqa: E402

MIB = 1 << 20


class Sleeps(RuleBasedStateMachine):
    """Pieces come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(lambda nbytes: pinned(nbytes, "cpu"))
        self.rooms: list[tuple[Room, int, int]] = []
        self.most = self.count = 0

    @rule(sizes=st.lists(st.integers(0, 3 * MIB) | st.integers(0, 2000), max_size=8))
    def sleep(self, sizes: list[int]) -> None:
        self.arena.reserve(sizes)
        for size in sizes:
            self.count += 1
            room = self.arena.take(size)
            for part in room.parts:
                part.fill_(self.count % 251)
            self.rooms.append((room, size, self.count % 251))
        rounded = sum(-(-size // offload_module.GRAIN) * offload_module.GRAIN for _, size, _ in self.rooms)
        self.most = max(self.most, rounded)

    @rule(draw=st.data())
    def wake(self, draw: Any) -> None:
        if self.rooms:
            self.rooms.pop(draw.draw(st.integers(0, len(self.rooms) - 1)))

    @rule()
    def wake_all(self) -> None:
        self.rooms.clear()
        self.arena.reserve([])
        assert self.arena._spans.size == self.arena.nbytes
        assert len(self.arena._spans) == len(self.arena._regions)

    @invariant()
    def each_has_its_own(self) -> None:
        for room, size, number in self.rooms:
            assert sum(part.numel() for part in room.parts) == size
            assert all(bool((part == number).all()) for part in room.parts)

    @invariant()
    def no_more_than_was_needed_at_once(self) -> None:
        """But for what regions are rounded up by."""
        assert self.most <= self.arena.nbytes < self.most + (len(self.arena._regions) + 1) * 2 * MIB


def test_pieces_that_come_and_go() -> None:
    run_state_machine_as_test(Sleeps, settings=settings(max_examples=30, stateful_step_count=20, deadline=None))


def test_no_room_on_the_host() -> None:
    """Nothing is pinned then, and what there is serves still."""
    free = [6 * MIB, 3 * MIB]
    arena = Offload("cpu", lambda: free.pop(0))._pinned
    arena.reserve([5 * MIB])
    room = arena.take(5 * MIB)
    with pytest.raises(MemoryError, match=r"4 MiB .* to be pinned, beside the 6 MiB that are: 3 MiB are free"):
        arena.reserve([MIB, 4 * MIB])
    assert arena.nbytes == 6 * MIB
    del room
    arena.reserve([MIB, 5 * MIB])
    assert arena.take(6 * MIB).parts


class Played:
    """Plays the driver."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.now: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise DriverError("cuMemHostRegister_v2: operation not supported")
        self.now[address] = nbytes

    def unpin(self, address: int) -> None:
        assert ctypes.c_ubyte.from_address(address).value == 0  # it is still there
        del self.now[address]


def test_pinned_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whom it may be."""
    played = Played(False)
    monkeypatch.setattr(offload_module, "driver", lambda device: played)
    monkeypatch.setattr(offload_module, "in_use", lambda device: torch)
    arena = Arena(lambda nbytes: pinned(nbytes, "cuda:0"))
    arena.reserve([9 * MIB])
    room = arena.take(9 * MIB)
    assert list(played.now.values()) == [10 * MIB]
    assert int(sum(part.sum() for part in room.parts)) == 0
    (part,) = room.parts
    del arena, room
    gc.collect()
    assert played.now
    del part
    assert not played.now


@pytest.mark.parametrize("has_driver", [False, True])
def test_where_the_driver_does_not(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    """Torch has its own way; in pieces that it doesn't round up."""
    empty, sizes = torch.empty, []

    def noted(size: int, pin_memory: bool, **options: Any) -> Any:
        assert pin_memory
        sizes.append(size)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(offload_module, "driver", lambda device: Played(True) if has_driver else None)
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
