"""Tests that each role has its own default generators of `random`, NumPy and torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec
from colocate.errors import GroupRestarted
from colocate.executor import OwnProcess
from colocate.testing.executors._base import Spawn, needs, needs_feature, smoke
from colocate.testing.executors.tensors import TensorCase
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.numbers import Numbers, draw_on_worker
from colocate.testing.waiting import PATIENCE_S

LIBRARIES = 7  # Each draw returns this many numbers.


def are_distinct(drawn: list[list[float]]) -> bool:
    """Return whether no number was drawn twice."""
    return len({number for numbers in drawn for number in numbers}) == LIBRARIES * len(drawn)


class RandomNumbers(TensorCase):
    """Tests of random numbers from the default generators."""

    @pytest.fixture(autouse=True)
    def numpy(self) -> None:
        """Skip the tests if NumPy isn't installed."""
        pytest.importorskip("numpy")

    @contextmanager
    def spawn_again(
        self, roles: dict[str, RoleSpec[Any]], *, slots: int = 1, seed: int = 0
    ) -> Iterator[ColocatedGroup]:
        """A context manager with a group that always has the same name, in a separate runtime."""
        with self.connect(seed=seed) as runtime, runtime.reserve(slots, cpus=0) as pool:
            yield pool.spawn(roles, name="numbers")

    @smoke
    @needs_feature("functions")
    def test_ranks_and_spawns(self, torch: Any, spawn: Spawn) -> None:
        """All ranks of all roles and groups draw different numbers, and so do functions."""
        drawn: list[list[float]] = []
        for name in ("numbers", "others"):
            group = spawn({"one": colocate.role(Numbers), "two": colocate.role(Numbers)}, name=name)
            for role in ("one", "two"):
                drawn += [value for of_rank in group.role(role, Numbers).draws() for value in of_rank]
            drawn += group.run(draw_on_worker)
            group.close()
        assert len(drawn) == 2 * (2 * 2 * 2 + 2)
        assert are_distinct(drawn)

    @needs(OwnProcess)
    @needs_feature("functions")
    def test_seed_reproduces_random_numbers(self, torch: Any) -> None:
        """Runs with the same seed draw the same numbers, and a run with another seed draws other numbers."""
        draws = []
        for seed in (0, 0, 1):
            with self.spawn_again({"one": colocate.role(Numbers)}, slots=2, seed=seed) as group:
                one = group.role("one", Numbers)
                draws.append((one.draws(), one.soon(2), group.run(draw_on_worker)))
        assert draws[0] == draws[1]
        assert are_distinct([*draws[0][1][0], *draws[0][1][1], *draws[2][1][0], *draws[2][1][1]])

    @needs(OwnProcess)
    @needs_feature("checkpoints")
    def test_restarts(self, torch: Any, spawn: Spawn, tmp_path: Path) -> None:
        """After a restart, a role draws new numbers, or continues where the checkpoint was taken."""
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(Lasting), "one": colocate.role(Numbers)}
        group = spawn(roles, slots=1, on_failure="restart")
        one = group.role("one", Numbers)
        drawn = one.draws()[0]
        self._kill_rank(group)
        drawn += one.draws()[0]
        assert are_distinct(drawn)
        group.checkpoint(tmp_path / "saved")
        expected = one.draws()[0][-1]
        self._kill_rank(group)
        assert one.draws()[0][-1] == expected

    def _kill_rank(self, group: ColocatedGroup) -> None:
        with pytest.raises(GroupRestarted):
            group.role("lasting", Lasting).kill(0)
        group.wait_ready(PATIENCE_S)
