"""`vmm.c` on a simulated driver: memory is taken from its addresses and given back."""

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
    """A large segment has large chunks, with a shorter last one, and a range may end within a chunk.

    An old serial takes nothing from a new segment at the same addresses, and a segment that sleeps can be freed. A
    thread that has used no device yet may give memory, too.
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
    """A failed sleep keeps only the chunks that the driver didn't release, and can be retried or woken."""
    for call in range(1, 8):
        segment = made(gpu, 3 * GRAIN)
        fill(segment.address, segment.size, 7)
        gpu.fail_at(call)
        with pytest.raises(VmmError, match="on purpose"):
            gpu.vmm.take_memory(0, chunks(segment, 0, 1, 2))
        gpu.fail_at(0)
        left = gpu.state()[0]
        assert left == (3 * GRAIN if call == 1 else GRAIN)  # nothing is taken before the device is idle
        assert gpu.vmm.present_bytes(segment.address, segment.size) == left
        assert gpu.vmm.absent_bytes(0)[0] == 3 * GRAIN - left
        gpu.vmm.give_memory(0, [(segment.address, segment.size)])
        fill(segment.address, segment.size, 8)
        gpu.vmm.take_memory(0, chunks(segment, 0, 1, 2))
        assert gpu.state()[0] == 0
        gpu.free(segment.address)


def test_a_segment_that_can_not_be_let_go_of(gpu: PlayedVmm) -> None:
    """A segment that can't be freed keeps its addresses reserved."""
    segment = made(gpu, 2 * GRAIN)
    ranges = gpu.state()[2]
    gpu.fail_at(2)
    gpu.free(segment.address)
    gpu.fail_at(0)
    assert gpu.state() == (GRAIN, 1, ranges)
    assert gpu.vmm.absent_bytes(0) == (0, 0)
    assert gpu.vmm.list_segments(0) == []


def test_a_wake_that_fails(gpu: PlayedVmm) -> None:
    """A failed wake changes nothing, and can be retried."""
    segment = made(gpu, 4 * GRAIN)
    for index in range(4):
        fill(segment.address + index * GRAIN, GRAIN, index + 1)
    gpu.vmm.take_memory(0, chunks(segment, 0, 1, 2, used=5))
    failures = 0
    while True:
        gpu.fail_at(failures + 1)
        try:
            gpu.vmm.give_memory(0, [(segment.address + GRAIN - 1, 2)])  # across the first two chunks
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
    gpu.limit(3 * GRAIN)  # no room for the last chunk
    with pytest.raises(VmmError, match="out of memory"):
        gpu.vmm.give_memory(0, [(segment.address, segment.size)])
    assert gpu.state() == (3 * GRAIN, 3, 1)
    gpu.free(segment.address)
    assert gpu.state() == (0, 0, 0)


def test_a_segment_that_can_not_be_made(gpu: PlayedVmm) -> None:
    """A segment whose allocation fails leaves nothing behind."""
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
