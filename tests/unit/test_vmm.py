"""Memory that is taken from its addresses and given back to them: `vmm.c` itself, on a driver that is played."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
from tests.unit.played_vmm import GRAIN, PlayedVmm, fill, holds

from colocate.features.memory.vmm import Chunk, Segment, VmmError


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[PlayedVmm]:
    played = PlayedVmm(tmp_path)
    yield played
    played.end()


def made(gpu: PlayedVmm, size: int) -> Segment:
    address = gpu.alloc(size)
    assert address is not None
    return next(each for each in gpu.vmm.list_segments(0) if each.address == address)


def chunks(segment: Segment, *indices: int, used: int = 0) -> list[Chunk]:
    return [Chunk(segment.address + index * segment.chunk, segment.serial, used) for index in indices]


def test_segments(gpu: PlayedVmm) -> None:
    """Large ones have large chunks: of the last one there is what there is; a range may end within one.

    Nothing is taken from a segment that has the addresses of one that is no more, and what sleeps can be let go of.
    A thread that has used no device yet may ask, too.
    """
    gpu.limit(512 << 20)
    large = made(gpu, 320 << 20)
    assert large.chunk == 128 << 20
    gpu.vmm.take_memory(0, chunks(large, 1, 2))
    assert gpu.vmm.absent_bytes(0)[0] == 192 << 20
    assert gpu.vmm.present_bytes(large.address, 320 << 20) == 128 << 20
    with ThreadPoolExecutor(1) as thread:
        thread.submit(gpu.vmm.give_memory, 0, [(large.address + (257 << 20), 1)]).result()
    assert gpu.vmm.absent_bytes(0)[0] == 128 << 20
    gpu.free(large.address)
    old = made(gpu, 2 * GRAIN)
    gpu.vmm.take_memory(0, chunks(old, 1))
    gpu.free(old.address)
    assert gpu.state()[0] == 0
    gpu.vmm.take_memory(0, chunks(old, 0))
    with pytest.raises(VmmError, match="colocate_vmm_give"):
        gpu.vmm.give_memory(0, [(old.address, GRAIN)])
    new = made(gpu, 2 * GRAIN)
    gpu.vmm.take_memory(0, [attrs.evolve(each, serial=old.serial) for each in chunks(new, 0, 1)])
    assert gpu.vmm.absent_bytes(0) == (0, 0)
    with pytest.raises(VmmError, match="cuDeviceGet"):
        gpu.vmm.take_memory(99, [])


def test_a_sleep_that_fails(gpu: PlayedVmm) -> None:
    """What the driver doesn't let go of is there, and the rest has gone; it can be tried again, and woken."""
    for call in range(1, 8):
        segment = made(gpu, 3 * GRAIN)
        fill(segment.address, segment.size, 7)
        gpu.fail_at(call)
        with pytest.raises(VmmError, match="on purpose"):
            gpu.vmm.take_memory(0, chunks(segment, 0, 1, 2))
        gpu.fail_at(0)
        left = gpu.state()[0]
        assert left == (3 * GRAIN if call == 1 else GRAIN)  # nothing is taken while the device computes
        assert gpu.vmm.present_bytes(segment.address, segment.size) == left
        assert gpu.vmm.absent_bytes(0)[0] == 3 * GRAIN - left
        gpu.vmm.give_memory(0, [(segment.address, segment.size)])
        fill(segment.address, segment.size, 8)
        gpu.vmm.take_memory(0, chunks(segment, 0, 1, 2))
        assert gpu.state()[0] == 0
        gpu.free(segment.address)


def test_a_segment_that_can_not_be_let_go_of(gpu: PlayedVmm) -> None:
    """Nobody else gets its addresses."""
    segment = made(gpu, 2 * GRAIN)
    ranges = gpu.state()[2]
    gpu.fail_at(2)
    gpu.free(segment.address)
    gpu.fail_at(0)
    assert gpu.state() == (GRAIN, 1, ranges)
    assert gpu.vmm.absent_bytes(0) == (0, 0)
    assert gpu.vmm.list_segments(0) == []


def test_a_wake_that_fails(gpu: PlayedVmm) -> None:
    """Nothing of it stays: what slept sleeps, what was there is as it was; it can be tried again."""
    segment = made(gpu, 4 * GRAIN)
    for index in range(4):
        fill(segment.address + index * GRAIN, GRAIN, index + 1)
    gpu.vmm.take_memory(0, chunks(segment, 0, 1, 2, used=5))
    failures = 0
    while True:
        gpu.fail_at(failures + 1)
        try:
            gpu.vmm.give_memory(0, [(segment.address + GRAIN - 1, 2)])  # of the first two
        except VmmError:
            failures += 1
        else:
            break
        finally:
            gpu.fail_at(0)
        assert gpu.state() == (GRAIN, 1, 1)
        assert gpu.vmm.absent_bytes(0) == (3 * GRAIN, 15)
    assert failures > 3
    assert gpu.state() == (3 * GRAIN, 3, 1)
    assert gpu.vmm.absent_bytes(0) == (GRAIN, 5)
    assert holds(segment.address + 3 * GRAIN, GRAIN, 4)
    gpu.limit(3 * GRAIN)  # there is no room for the last one
    with pytest.raises(VmmError, match="out of memory"):
        gpu.vmm.give_memory(0, [(segment.address, segment.size)])
    assert gpu.state() == (3 * GRAIN, 3, 1)
    gpu.free(segment.address)
    assert gpu.state() == (0, 0, 0)


def test_a_segment_that_can_not_be_made(gpu: PlayedVmm) -> None:
    """Nothing of it is left, wherever that fails."""
    for call in range(1, 20):
        gpu.fail_at(call)
        address = gpu.alloc(3 * GRAIN)
        gpu.fail_at(0)
        if address is not None:
            assert call > 3
            gpu.free(address)
            break
        assert gpu.state() == (0, 0, 0)
        assert gpu.vmm.list_segments(0) == []
    else:
        pytest.fail("it always failed")
