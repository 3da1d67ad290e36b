"""Tests of the context of role code: rank, slot, device and torch's number of threads."""

from __future__ import annotations

import pytest

from colocate import ColocatedGroup
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, needs, smoke
from colocate.testing.probes.plain import Echo
from colocate.testing.probes.tensors import Tensors


class Contexts(ExecutorCase):
    """Tests of the facts that a role's context contains."""

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
        """A slot that is reserved without `gpus=` has the executor's default device."""
        pytest.importorskip("torch")
        assert [device for device, _ in pair.role("tensors", Tensors).device()] == [self.device] * 2

    @needs(OwnProcess)
    def test_threads_of_torch(self, pair: ColocatedGroup) -> None:
        """In a worker process, torch has as many threads as the slot has CPUs, and at least one."""
        pytest.importorskip("torch")
        assert [threads for _, threads in pair.role("tensors", Tensors).device()] == [1, 1]
