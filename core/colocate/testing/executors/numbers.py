"""The default generators of `random`, NumPy and torch, and torch's switches: each role has its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup, RoleSpec
from colocate.errors import GroupRestarted, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import Spawn, needs, needs_feature, of_executor, smoke
from colocate.testing.executors.tensors import TensorCase
from colocate.testing.probes.lasting import Lasting
from colocate.testing.probes.numbers import Numbers, Switching, draw, draw_there, seed_there
from colocate.testing.waiting import PATIENCE_S

LIBRARIES = 7  # how many numbers are drawn at once
NEIGHBOURS = {"before": colocate.role(Numbers), "after": colocate.role(Numbers, seed=42)}


def apart(drawn: list[list[float]]) -> bool:
    """Whether no number was given twice, by one generator or by two."""
    return len({number for each in drawn for number in each}) == LIBRARIES * len(drawn)


class RandomNumbers(TensorCase):
    """Numbers of the default generators."""

    @pytest.fixture(autouse=True)
    def numpy(self) -> None:
        """NumPy is needed, too."""
        pytest.importorskip("numpy")

    @contextmanager
    def again(self, roles: dict[str, RoleSpec[Any]], *, slots: int = 1, seed: int = 0) -> Iterator[ColocatedGroup]:
        """A group of the same name in a runtime of its own, which is closed."""
        with self.connect(seed=seed) as runtime, runtime.reserve(slots, cpus=0) as pool:
            yield pool.spawn(roles, name="numbers")

    @smoke
    @needs_feature("functions")
    def test_ranks_and_spawns(self, torch: Any, spawn: Spawn) -> None:
        """Each rank of each role of each group draws other numbers, in constructors and in methods; so do functions."""
        drawn: list[list[float]] = []
        for name in ("numbers", "others"):
            group = spawn({"one": colocate.role(Numbers), "two": colocate.role(Numbers)}, name=name)
            for role in ("one", "two"):
                drawn += [each for of_rank in group.role(role, Numbers).draws() for each in of_rank]
            drawn += group.run(draw_there)
            group.close()
        assert len(drawn) == 2 * (2 * 2 * 2 + 2)
        assert apart(drawn)

    @needs(OwnProcess)
    @of_executor
    @needs_feature("functions")
    def test_they_can_be_drawn_again(self, torch: Any) -> None:
        """A run of the same seed draws the same, another one others."""
        found = []
        for seed in (0, 0, 1):
            with self.again({"one": colocate.role(Numbers)}, slots=2, seed=seed) as group:
                one = group.role("one", Numbers)
                found.append((one.draws(), one.soon(2), group.run(draw_there)))
        assert found[0] == found[1]
        assert apart([*found[0][1][0], *found[0][1][1], *found[2][1][0], *found[2][1][1]])

    @needs(OwnProcess)
    @needs_feature("pipelines")
    @needs_feature("functions")
    def test_neighbours_change_nothing(self, torch: Any, spawn: Spawn) -> None:
        """A role draws what it draws by itself, whatever others of its slot, or functions, seed and draw meanwhile."""
        group = spawn({**NEIGHBOURS, "one": colocate.role(Numbers)}, slots=1, name="numbers")
        one, after = group.role("one", Numbers), group.role("after", Numbers)
        one.draws()
        after.seed(42)
        group.role("before", Numbers).draws()
        one.draws()
        group.run(seed_there, 42)
        with group.pipeline():
            drawing, seeding = one.soon.submit(4), after.seed_again_and_again.submit(4)
        seeding.result()
        assert len(drawing.result()[0]) == 7
        with pytest.raises(RoleError):
            after.seed("no number")  # type: ignore[arg-type]
        crowded = one.draws()
        group.close()
        with self.again({"one": colocate.role(Numbers)}) as group:
            alone = group.role("one", Numbers)
            by_itself = [alone.draws() for _ in range(7)]
        assert crowded == by_itself[-1]

    @needs(OwnProcess)
    def test_a_role_that_seeds(self, torch: Any, spawn: Spawn) -> None:
        """A role draws what a script draws that seeds and does nothing else, to the last digit."""
        code = f"from {draw.__module__} import *; seed_all(5); print([draw({self.device!r}) for _ in range(6)])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
        script = json.loads(done.stdout)
        group = spawn({**NEIGHBOURS, "one": colocate.role(Numbers, seed=5)}, slots=1)
        for count in range(2, 7):
            assert group.role("one", Numbers).draws() == [script[:count]]
            group.role("before", Numbers).draws()
            group.role("after", Numbers).seed(42)

    @needs(OwnProcess)
    @needs_feature("checkpoints")
    def test_checkpoints_keep_them(self, torch: Any, tmp_path: Path) -> None:
        """What goes on from a checkpoint draws what the uninterrupted run does."""
        roles = {**NEIGHBOURS, "one": colocate.role(Numbers)}

        def step(group: ColocatedGroup) -> list[Any]:
            return [group.role(name, Numbers).draws()[0][-1] for name in roles]

        with self.again(roles) as group:
            step(group)
            group.checkpoint(tmp_path / "saved")
            expected = [step(group), step(group)]
            group.restore(tmp_path / "saved")
            assert [step(group), step(group)] == expected
        with self.again(roles) as group:
            group.restore(tmp_path / "saved")
            assert [step(group), step(group)] == expected

    @needs(OwnProcess)
    @of_executor
    @needs_feature("checkpoints")
    def test_restarts(self, torch: Any, spawn: Spawn, tmp_path: Path) -> None:
        """After a restart a role draws others than before; what a checkpoint has goes on there."""
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(Lasting), "one": colocate.role(Numbers)}
        group = spawn(roles, slots=1, on_failure="restart")
        one = group.role("one", Numbers)
        drawn = one.draws()[0]
        self._kill(group)
        drawn += one.draws()[0]
        assert apart(drawn)
        group.checkpoint(tmp_path / "saved")
        expected = one.draws()[0][-1]
        self._kill(group)
        assert one.draws()[0][-1] == expected

    def _kill(self, group: ColocatedGroup) -> None:
        with pytest.raises(GroupRestarted):
            group.role("lasting", Lasting).kill(0)
        group.wait_ready(PATIENCE_S)

    def test_threads_share_them(
        self, torch: Any, spawn: Spawn, runtime: colocate.Runtime, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Where workers are threads of the driver's process, who seeds for all is told once; elsewhere nobody is."""
        group = spawn({"one": colocate.role(Numbers), "seeds": colocate.role(Numbers)}, slots=1)
        told = []
        for _ in range(2):
            group.role("seeds", Numbers).seed(42)
            group.role("one", Numbers).draws()
            told.append([each for each in caplog.messages if "has seeded torch's default generator" in each])
        if isinstance(runtime._node.services.executor, OwnProcess):
            assert told == [[], []]
        else:
            assert [len(each) for each in told] == [1, 1]
            assert "role 'seeds'" in told[0][0]

    @needs(OwnProcess)
    def test_switches(self, torch: Any, spawn: Spawn) -> None:
        """Torch's switches are as the role's own code has left them, and another role's as that has."""
        roles: dict[str, RoleSpec[Any]] = {
            "first": colocate.role(Switching),
            "sets": colocate.role(Switching, sets=True),
        }
        group = spawn({**roles, "last": colocate.role(Switching)}, slots=1)
        first, sets, last = (group.role(name, Switching) for name in ("first", "sets", "last"))
        usual, changed = first.told(), sets.told()
        assert all(one != other for one, other in zip(usual[0], changed[0], strict=True))
        for _ in range(2):
            assert (last.told(), sets.told(), first.told()) == (usual, changed, usual)
        assert first.switch() == changed
        assert (last.told(), first.told()) == (usual, changed)

    @needs(OwnProcess)
    def test_precision_in_other_terms(self, torch: Any, spawn: Spawn) -> None:
        """Torch refuses to tell in its older terms what was set in the newer ones: that is a role's own, too."""
        if not hasattr(torch.backends, "fp32_precision"):
            pytest.skip("this torch has the older terms only")
        group = spawn({"first": colocate.role(Switching), "sets": colocate.role(Switching, sets=True)}, slots=1)
        first, sets = group.role("first", Switching), group.role("sets", Switching)
        older = sets.told(), sets.all_precisions()
        newer = first.newer()
        assert newer != older[1]
        for _ in range(2):
            assert (sets.told(), sets.all_precisions()) == older
            assert first.all_precisions() == newer
