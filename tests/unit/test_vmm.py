"""Memory that is taken from its addresses and given back to them: `vmm.c` itself, on a driver that is played."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.unit.played_vmm import GRAIN, PlayedVmm, fill, holds

from colocate.worker.memory.vmm import Chunk, Segment, VmmError


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[PlayedVmm]:
    played = PlayedVmm(tmp_path)
    yield played
    played.end()


def made(gpu: PlayedVmm, size: int) -> Segment:
    address = gpu.alloc(size)
    assert address is not None
    return next(each for each in gpu.vmm.segments(0) if each.address == address)


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
    gpu.vmm.take(0, chunks(large, 1, 2))
    assert gpu.vmm.absent(0)[0] == 192 << 20
    assert gpu.vmm.present(large.address, 320 << 20) == 128 << 20
    with ThreadPoolExecutor(1) as thread:
        thread.submit(gpu.vmm.give, 0, [(large.address + (257 << 20), 1)]).result()
    assert gpu.vmm.absent(0)[0] == 128 << 20
    gpu.free(large.address)
    old = made(gpu, 2 * GRAIN)
    gpu.vmm.take(0, chunks(old, 1))
    gpu.free(old.address)
    assert gpu.state()[0] == 0
    gpu.vmm.take(0, chunks(old, 0))
    with pytest.raises(VmmError, match="colocate_vmm_give"):
        gpu.vmm.give(0, [(old.address, GRAIN)])
    new = made(gpu, 2 * GRAIN)
    gpu.vmm.take(0, [attrs.evolve(each, serial=old.serial) for each in chunks(new, 0, 1)])
    assert gpu.vmm.absent(0) == (0, 0)
    with pytest.raises(VmmError, match="cuDeviceGet"):
        gpu.vmm.take(99, [])


def test_a_sleep_that_fails(gpu: PlayedVmm) -> None:
    """What the driver doesn't let go of is there, and the rest has gone; it can be tried again, and woken."""
    for call in range(1, 8):
        segment = made(gpu, 3 * GRAIN)
        fill(segment.address, segment.size, 7)
        gpu.fail_at(call)
        with pytest.raises(VmmError, match="on purpose"):
            gpu.vmm.take(0, chunks(segment, 0, 1, 2))
        gpu.fail_at(0)
        left = gpu.state()[0]
        assert left == (3 * GRAIN if call == 1 else GRAIN)  # nothing is taken while the device computes
        assert gpu.vmm.present(segment.address, segment.size) == left
        assert gpu.vmm.absent(0)[0] == 3 * GRAIN - left
        gpu.vmm.give(0, [(segment.address, segment.size)])
        fill(segment.address, segment.size, 8)
        gpu.vmm.take(0, chunks(segment, 0, 1, 2))
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
    assert gpu.vmm.absent(0) == (0, 0)
    assert gpu.vmm.segments(0) == []


class Machine(RuleBasedStateMachine):
    """Segments that come and go, and chunks that lose their memory and get it again, with little of it and failures."""

    gpu: PlayedVmm

    def __init__(self) -> None:
        super().__init__()
        self.gpu.limit(12 * GRAIN)
        self.there: dict[Segment, list[int | None]] = {}  # what each chunk is filled with; None without memory
        self.value = 0

    def _fill(self, segment: Segment, index: int) -> None:
        self.value = self.value % 250 + 1
        fill(segment.address + index * GRAIN, GRAIN, self.value)
        self.there[segment][index] = self.value

    @rule(size=st.integers(1, 5), failing=st.integers(0, 20))
    def alloc(self, size: int, failing: int) -> None:
        fits = self._used() + size <= 12
        self.gpu.fail_at(failing if fits else 0)  # one thing goes wrong at a time
        known = {segment.address for segment in self.there}
        address = self.gpu.alloc(size * GRAIN)
        self.gpu.fail_at(0)
        if address is None:
            assert failing or not fits
            return
        assert fits
        assert address not in known
        segment = next(each for each in self.gpu.vmm.segments(0) if each.address == address)
        self.there[segment] = [None] * size
        for index in range(size):
            self._fill(segment, index)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        segment = data.draw(st.sampled_from(list(self.there)))
        self.gpu.free(segment.address)
        del self.there[segment]

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def take(self, data: Any) -> None:
        wanted = [
            (segment, index)
            for segment, values in self.there.items()
            for index in data.draw(st.sets(st.integers(0, len(values) - 1)))
        ]
        self.gpu.vmm.take(0, [each for segment, index in wanted for each in chunks(segment, index, used=index)])
        for segment, index in wanted:
            self.there[segment][index] = None

    @precondition(lambda self: self.there)
    @rule(data=st.data(), failing=st.integers(0, 20))
    def give(self, data: Any, failing: int) -> None:
        ranges, coming = [], []
        for segment, values in self.there.items():
            first = data.draw(st.integers(0, len(values) * GRAIN - 1))
            size = data.draw(st.integers(0, len(values) * GRAIN - first))
            ranges.append((segment.address + first, size))
            coming += [
                (segment, index)
                for index, value in enumerate(values)
                if value is None and first < (index + 1) * GRAIN and index * GRAIN < first + size
            ]
        fits = self._used() + len(coming) <= 12
        self.gpu.fail_at(failing if fits else 0)
        try:
            self.gpu.vmm.give(0, ranges)
        except VmmError:
            assert failing or not fits
            return
        finally:
            self.gpu.fail_at(0)
        assert fits
        for segment, index in coming:
            self._fill(segment, index)

    def _used(self) -> int:
        return sum(value is not None for values in self.there.values() for value in values)

    @invariant()
    def it_is_as_noted(self) -> None:
        in_use, mappings, ranges = self.gpu.state()
        assert in_use == self._used() * GRAIN
        assert mappings == self._used()
        assert ranges == len(self.there)
        absent = [index for values in self.there.values() for index, value in enumerate(values) if value is None]
        assert self.gpu.vmm.absent(0) == (len(absent) * GRAIN, sum(absent))
        assert set(self.gpu.vmm.segments(0)) == self.there.keys()
        for segment, values in self.there.items():
            for index, value in enumerate(values):
                address = segment.address + index * GRAIN
                assert self.gpu.vmm.present(address, GRAIN) == (0 if value is None else GRAIN)
                assert value is None or holds(address, GRAIN, value)

    def teardown(self) -> None:
        for segment in self.gpu.vmm.segments(0):
            self.gpu.free(segment.address)
        left = self.gpu.state()
        self.gpu.end()
        assert left == (0, 0, 0)


def test_any_order(gpu: PlayedVmm) -> None:
    """Whatever happens, and wherever the driver fails."""
    Machine.gpu = gpu
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
