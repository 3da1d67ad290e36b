"""GPU samples by one worker of each node; NVML is faked, and the driver believes that the slots have a GPU."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest
from tests.suite.devices.probes import GIB, HasNvml
from tests.suite.marks import mark_executor_part

import colocate
from colocate import ColocatedGroup, DeviceSample
from colocate.driver import Driver
from colocate.testing.executors._base import ExecutorCase, Spawn
from colocate.testing.waiting import PATIENCE_S, wait_until


class SampleObserver:
    """An observer that collects GPU samples."""

    def __init__(self) -> None:
        self.samples: queue.SimpleQueue[Sequence[DeviceSample]] = queue.SimpleQueue()

    def colocate_devices_sampled(self, samples: Sequence[DeviceSample]) -> None:
        """Store the samples."""
        self.samples.put(samples)


class Devices(ExecutorCase):
    """Samples of GPUs."""

    @pytest.fixture
    def played(self, spawn: Spawn) -> Iterator[ColocatedGroup]:
        """Spawn two slots that seem to have the first GPU of a machine."""
        group = spawn({"gpu": colocate.role(HasNvml)})
        for worker in group._node.workforce.workers:
            worker.boot = attrs.evolve(worker.boot, device="cuda:0")
        yield group
        if group.state == "ready":
            group.role("gpu", HasNvml).forget()

    @pytest.mark.long
    @mark_executor_part
    def test_samples(self, played: ColocatedGroup) -> None:
        """Observers get samples of all slots with a GPU, and each XID error once, until the stop."""
        played.role("gpu", HasNvml).play()
        runtime: Any = played.owner.owner
        hears = SampleObserver()
        runtime.observe(hears)
        stop = Driver(runtime).watch_devices()
        batches = [hears.samples.get(timeout=PATIENCE_S) for _ in range(2)]
        assert [[list(sample.xids) for sample in batch] for batch in batches] == [[[79]], [[]]]
        (sample,) = batches[1]
        assert sorted(sample.slots) == [(played.name, 0), (played.name, 1)]
        assert (sample.uuid, sample.name, sample.use) == ("GPU-0000-aaaa", "NVIDIA Played", 0.87)
        assert (sample.memory, sample.memory_total) == (41 * GIB, 80 * GIB)
        assert (sample.watts, sample.celsius) == (310.5, 61.0)
        stop()
        wait_until(lambda: _is_quiet(hears), "nothing comes any more")

    @pytest.mark.long
    def test_a_node_without_nvml(self, played: ColocatedGroup) -> None:
        """A worker without NVML is asked only once."""
        gpu = played.role("gpu", HasNvml)
        gpu.play(fails=True)
        runtime: Any = played.owner.owner
        hears = SampleObserver()
        runtime.observe(hears)
        stop = Driver(runtime).watch_devices()
        watch: Any = stop.__self__  # type: ignore[attr-defined]
        wait_until(lambda: bool(watch._failed_nodes), "it has been asked")
        gpu.play()
        assert _is_quiet(hears)
        stop()

    @pytest.mark.long
    def test_slots_without_a_gpu(self, spawn: Spawn) -> None:
        """Workers without a GPU aren't asked: their group has no part of the feature."""
        group = spawn({"gpu": colocate.role(HasNvml)})
        runtime: Any = group.owner.owner
        stop = Driver(runtime).watch_devices()
        time.sleep(1.5)  # Longer than the sampling interval.
        stop()
        assert "devices" not in group._node.parts


def _is_quiet(hears: SampleObserver) -> bool:
    """Return whether no sample arrives for longer than the sampling interval."""
    while not hears.samples.empty():
        hears.samples.get()
    time.sleep(1.5)
    return hears.samples.empty()


AREAS = [Devices]
