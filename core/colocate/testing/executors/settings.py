"""What torch has set for a thread or a process: each role has its own, though they share both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import ColocatedGroup
from colocate.errors import RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import Spawn
from colocate.testing.executors.tensors import TensorCase
from colocate.testing.probes.settings import Casting, Changing, Learning, told_by

USUAL = {"grad": True, "inference": False, "autocast": None, "dtype": "torch.float32", "device": "cpu"}
SET = {"grad": False, "inference": True, "autocast": "torch.float16"}


class TorchSettings(TensorCase):
    """Whether gradients are recorded, inference mode, autocast, the usual dtype and device, from call to call."""

    @pytest.fixture
    def dtype(self, runtime: colocate.Runtime) -> bool:
        """Whether the process is the worker's own, so that what is set for a process is a role's to set."""
        return isinstance(runtime._node.services.executor, OwnProcess)

    @pytest.fixture
    def changed(self, dtype: bool) -> dict[str, Any]:
        """What is set where a role has changed it."""
        return {**SET, "dtype": "torch.float64" if dtype else "torch.float32", "device": "meta"}

    @pytest.fixture
    def group(self, torch: Any, spawn: Spawn, dtype: bool) -> ColocatedGroup:
        """One role that sets it in its constructor, between two that don't."""
        plain, changing = colocate.role(Changing, dtype=dtype), colocate.role(Changing, changes=True, dtype=dtype)
        return spawn({"first": plain, "changing": changing, "last": plain}, slots=1)

    def test_a_constructor_sets_it_for_its_role(self, group: ColocatedGroup, changed: dict[str, Any]) -> None:
        """It holds in the role's methods, also async ones, and in nobody else's."""
        for _ in range(2):
            for name, expected in (("first", USUAL), ("changing", changed), ("last", USUAL)):
                role = group.role(name, Changing)
                assert role.told() == role.soon() == [expected]
            assert group.run(told_by) == [USUAL]

    def test_between_awaits(self, group: ColocatedGroup, changed: dict[str, Any]) -> None:
        """It holds in all of an async method, also in blocks of it and in its tasks, whoever runs meanwhile."""
        first, changing = group.role("first", Changing), group.role("changing", Changing)
        with group.pipeline():
            calls = [first.across.submit(True), changing.across.submit(False), first.across.submit(False)]
            told = first.told.submit()
        in_blocks = {**USUAL, **SET, "device": "meta"}
        for call, expected in zip(calls, (in_blocks, changed, USUAL), strict=True):
            assert call.result() == [[expected] * 12]
        assert told.result() == [USUAL]
        assert first.told() == [USUAL]

    def test_a_method_sets_it_for_itself(self, group: ColocatedGroup, changed: dict[str, Any]) -> None:
        """What it leaves is forgotten: by its own role's next call, by others', and where it has raised."""
        first = group.role("first", Changing)
        assert first.change() == [changed]
        assert first.told() == [USUAL]
        first.change()
        assert group.role("last", Changing).told() == [USUAL]
        first.change()
        assert group.run(told_by) == [USUAL]
        with pytest.raises(RoleError, match="on purpose"):
            first.change_and_fail()
        assert group.role("last", Changing).soon() == [USUAL]

    def test_others_train_beside_it(self, torch: Any, spawn: Spawn) -> None:
        """A role that never leaves inference mode and autocast takes nobody along, nor what others have cast before."""
        group = spawn({"casting": colocate.role(Casting), "learning": colocate.role(Learning)}, slots=1)
        casting, learning = group.role("casting", Casting), group.role("learning", Learning)
        for computed, casts in enumerate((False, True, True, True)):
            assert casting.dtype() == "torch.bfloat16"
            assert learning.step(casts) == computed

    def test_in_hooks(self, group: ColocatedGroup, changed: dict[str, Any], tmp_path: Path) -> None:
        """What colocate calls of a role's for its own purposes is role code, too."""
        group.role("first", Changing).change()
        group.checkpoint(str(tmp_path / "saved"))
        for name, expected in (("first", USUAL), ("changing", changed), ("last", USUAL)):
            assert group.role(name, Changing).when_saved() == [expected]
