"""What role code knows of its place, what torch has set for it, and where its arguments' tensors are."""

from __future__ import annotations

import pytest

from colocate import ColocatedGroup
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, needs, smoke
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.tensors import Tensors


class Contexts(ExecutorCase):
    """The context is the same everywhere but for what differs."""

    @smoke
    def test_facts(self, pair: ColocatedGroup) -> None:
        """Rank, world size, slot, node, role, group and generation are right on every rank."""
        nodes = [slot.node for slot in pair.owner.slots]
        for rank, fact in enumerate(pair.role("echo", Echo).who()):
            assert fact.pop("seed") is not None
            assert fact == {
                "rank": rank,
                "world_size": 2,
                "slot": rank,
                "node": nodes[rank],
                "role": "echo",
                "group": pair.name,
                "generation": 0,
                "same": True,
            }

    def test_device(self, pair: ColocatedGroup) -> None:
        """A slot without GPUs has the CPU, one with GPUs the first of them."""
        pytest.importorskip("torch")
        assert [device for device, _ in pair.role("tensors", Tensors).device()] == [self.device] * 2

    @needs(OwnProcess)
    def test_threads_of_torch(self, pair: ColocatedGroup) -> None:
        """A worker that is a process gives torch as many threads as its slot has CPUs, and one at least."""
        pytest.importorskip("torch")
        assert [threads for _, threads in pair.role("tensors", Tensors).device()] == [1, 1]
