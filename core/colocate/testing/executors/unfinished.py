"""Memory of roles that sleeps amid a step: with gradients that aren't reduced yet, or operations that aren't done."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

import colocate
from colocate._role.method import Tag
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.unfinished import Accumulating, Hooked, Unfinished

_MIBS = 64


class SleepingAmidSteps(ExecutorCase):
    """What a call leaves for the next one is what it finds, whatever has slept in between."""

    @needs(OwnProcess)
    def test_gradients_that_are_not_reduced_yet(self, spawn: Spawn) -> None:
        """FSDP2 has them in objects of its own: they are gradients, and not lost with a cache."""
        torch = pytest.importorskip("torch")
        group = spawn({"one": colocate.role(Accumulating), "other": colocate.role(Accumulating)})
        one, other = group.role("one", Accumulating), group.role("other", Accumulating)
        for number in range(3):
            for trainer in (one, other):
                trainer.accumulate(number, number == 2)
            kinds = {row["role"]: row["gradients"] for row in group.memory().rows() if row["role"] in ("one", "other")}
            assert all(kinds.values()), kinds
            group.sleep("one", discard=["cache"])
        for mine, its in zip(one.update(), other.update(), strict=True):
            assert torch.equal(mine, its)

    def test_a_graph_and_hooks(self, spawn: Spawn) -> None:
        """A loss whose graph has saved weights; what is called back as a model computes and learns, in that order."""
        torch = pytest.importorskip("torch")
        group = spawn({"one": colocate.role(Hooked), "other": colocate.role(Hooked)})
        one, other = group.role("one", Hooked), group.role("other", Hooked)
        orders: list[Sequence[Tag] | None] = [None, ["weights"], ["optimizer", "grads"], None]
        for number, tags in enumerate(orders):
            assert one.begin(number) == other.begin(number)
            assert group.sleep("one", tags) > 0
            for (mine, heard), (its, expected) in zip(one.end(), other.end(), strict=True):
                assert all(torch.equal(*each) for each in zip(mine, its, strict=True))
                assert heard == expected
                assert {*heard} >= {"forward ends", "backward ends", "gradient", "update", "step"}
            group.sleep("one")

    @needs(OwnProcess)
    def test_operations_under_way(self, spawn: Spawn) -> None:
        """A sleep waits for what is written yet, also by a rank that comes to it later."""
        pytest.importorskip("torch")
        group = spawn({"role": colocate.role(Unfinished, _MIBS)})
        role = group.role("role", Unfinished)
        for _ in range(2):
            with Gate() as gate:
                role.begin_sum.submit(gate.address)
                gate.wait_for()
                with ThreadPoolExecutor(1) as pool:
                    sleeping = pool.submit(group.sleep, "role")
                    gate.open()
                    assert sleeping.result() > 0
            assert role.end() == [(3.0, 3.0)] * 2
