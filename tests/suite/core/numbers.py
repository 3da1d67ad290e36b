"""Each role has its own default generators of `random`, NumPy and torch, and its own torch switches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.suite.probes.numbers import Switching, seed_on_worker

import colocate
from colocate import ColocatedGroup, RoleSpec
from colocate.errors import RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors import numbers
from colocate.testing.executors._base import Spawn, needs, needs_feature
from colocate.testing.probes.numbers import Numbers, draw_numbers
from colocate.testing.waiting import PATIENCE_S

NEIGHBOURS = {"before": colocate.role(Numbers), "after": colocate.role(Numbers, seed=42)}


class RandomNumbers(numbers.RandomNumbers):
    """Numbers of the default generators."""

    @needs(OwnProcess)
    @needs_feature("pipelines")
    @needs_feature("functions")
    def test_neighbours_change_nothing(self, torch: Any, spawn: Spawn) -> None:
        """A role draws the same numbers alone and beside roles and functions that seed and draw on its slot."""
        group = spawn({**NEIGHBOURS, "one": colocate.role(Numbers)}, slots=1, name="numbers")
        one, after = group.role("one", Numbers), group.role("after", Numbers)
        one.draws()
        after.seed(42)
        group.role("before", Numbers).draws()
        one.draws()
        group.run(seed_on_worker, 42)
        with group.pipeline():
            drawing, seeding = one.soon.submit(4), after.seed_again_and_again.submit(4)
        seeding.result()
        assert len(drawing.result()[0]) == 7
        with pytest.raises(RoleError):
            after.seed("no number")  # type: ignore[arg-type]
        crowded = one.draws()
        group.close()
        with self.spawn_again({"one": colocate.role(Numbers)}) as group:
            alone = group.role("one", Numbers)
            by_itself = [alone.draws() for _ in range(7)]
        assert crowded == by_itself[-1]

    @needs(OwnProcess)
    def test_a_role_that_seeds(self, torch: Any, spawn: Spawn) -> None:
        """A role that seeds draws exactly the numbers of a script that seeds alike."""
        draws = f"[draw_numbers({self.device!r}) for _ in range(6)]"
        code = f"from {draw_numbers.__module__} import *; seed_all(5); print({draws})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
        script = json.loads(done.stdout)
        group = spawn({**NEIGHBOURS, "one": colocate.role(Numbers, seed=5)}, slots=1)
        for count in range(2, 7):
            assert group.role("one", Numbers).draws() == [script[:count]]
            group.role("before", Numbers).draws()
            group.role("after", Numbers).seed(42)

    @needs(OwnProcess)
    @needs_feature("checkpoints")
    def test_restored_group_continues_the_numbers(self, torch: Any, tmp_path: Path) -> None:
        """A group restored from a checkpoint draws the numbers of the uninterrupted run."""
        roles = {**NEIGHBOURS, "one": colocate.role(Numbers)}

        def step(group: ColocatedGroup) -> list[Any]:
            return [group.role(name, Numbers).draws()[0][-1] for name in roles]

        with self.spawn_again(roles) as group:
            step(group)
            group.checkpoint(tmp_path / "saved")
            expected = [step(group), step(group)]
            group.restore(tmp_path / "saved")
            assert [step(group), step(group)] == expected
        with self.spawn_again(roles) as group:
            group.restore(tmp_path / "saved")
            assert [step(group), step(group)] == expected

    def test_seeding_shared_generators_is_logged_once(
        self, torch: Any, spawn: Spawn, runtime: colocate.Runtime, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Seeding the generators that threads share is logged once; workers with their own process log nothing."""
        group = spawn({"one": colocate.role(Numbers), "seeds": colocate.role(Numbers)}, slots=1)
        seeding_messages = []
        for _ in range(2):
            group.role("seeds", Numbers).seed(42)
            group.role("one", Numbers).draws()
            seeding_messages.append(
                [message for message in caplog.messages if "has seeded torch's default generator" in message]
            )
        if isinstance(runtime._node.services.executor, OwnProcess):
            assert seeding_messages == [[], []]
        else:
            assert [len(message) for message in seeding_messages] == [1, 1]
            assert "role 'seeds'" in seeding_messages[0][0]

    @needs(OwnProcess)
    def test_switches(self, torch: Any, spawn: Spawn) -> None:
        """Each role keeps its own values of torch's switches from call to call."""
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
        assert first.set_switches() == changed
        assert (last.told(), first.told()) == (usual, changed)

    @needs(OwnProcess)
    def test_precision_in_other_terms(self, torch: Any, spawn: Spawn) -> None:
        """Each role keeps its own precision settings, in torch's older and newer terms."""
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
