"""Checkpoints that are written while calls run: `group.checkpoint(..., wait=False)`."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.suite.marks import mark_executor_part
from tests.suite.probes.halves import HalfSaver, LateSaver
from tests.suite.probes.lasting import Drawing

import colocate
from colocate import Call, ColocatedGroup, RoleSpec
from colocate.errors import ClosedError, GroupRestarted, RoleError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs
from colocate.testing.gate import Gate
from colocate.testing.probes.lasting import Lasting
from colocate.testing.waiting import PATIENCE_S


def read_tag(folder: Path) -> Any:
    """Return the tag of a folder's checkpoint, or None without one."""
    path = folder / "checkpoint.json"
    return json.loads(path.read_text())["tag"] if path.exists() else None


class SavingBeside(ExecutorCase):
    """Checkpoints with `wait=False` beside running calls."""

    @pytest.fixture
    def halved(self, spawn: Spawn) -> Callable[..., ColocatedGroup]:
        """Return a function that spawns a role whose `save` has two halves."""

        def make(gate: Gate | None = None, how: str = "", slow: int | None = None, **options: Any) -> ColocatedGroup:
            address = None if gate is None else gate.address
            return spawn({"halved": colocate.role(HalfSaver, address, how, slow)}, **options)

        return make

    @mark_executor_part
    def test_calls_continue_during_checkpoint_write(
        self, halved: Callable[..., ColocatedGroup], tmp_path: Path
    ) -> None:
        """A checkpoint has the state of its request while calls continue, and exists once all ranks have written."""
        with Gate() as gate:
            group = halved(gate, slow=1)
            role = group.role("halved", HalfSaver)
            role.add(3)
            saving = group.checkpoint(tmp_path / "one", tag="first", wait=False)
            gate.wait_for()
            assert role.add(4) == [7, 7]
            assert not saving.done()
            with pytest.raises(TimeoutError):
                saving.result(0.1)
            assert not (tmp_path / "one").exists()
            gate.open()
            saving.result(PATIENCE_S)
        assert role.add() == [8, 8]
        assert group.restore(tmp_path / "one") == "first"
        assert role.add(0) == [3, 3]
        assert [path.name for path in tmp_path.iterdir()] == ["one"]

    @pytest.mark.parametrize("how", ["future", "thread", "attribute"])
    def test_calls_continue_while_save_finishes(self, spawn: Spawn, tmp_path: Path, how: str) -> None:
        """A checkpoint waits for a future or thread of `save`, returned or in an attribute, while calls continue."""
        with Gate() as gate:
            group = spawn({"going": colocate.role(LateSaver, how, gate.address)})
            role = group.role("going", LateSaver)
            role.add(3)
            saving = group.checkpoint(tmp_path / "one", wait=False)
            gate.wait_for(2)
            assert role.add() == [4, 4]
            assert not saving.done()
            gate.open()
            saving.result(PATIENCE_S)
        group.restore(tmp_path / "one")
        assert role.add(0) == [3, 3]

    def test_the_same_as_one_that_is_waited_for(self, spawn: Spawn, tmp_path: Path) -> None:
        """A checkpoint with `wait=False` has the same files as one without, also of roles without a second half."""
        roles: dict[str, RoleSpec[Any]] = {"halved": colocate.role(HalfSaver), "lasting": colocate.role(Lasting)}
        group = spawn(roles)
        group.role("halved", HalfSaver).add(5)
        group.checkpoint(tmp_path / "one", tag="same")
        group.checkpoint(tmp_path / "two", tag="same", wait=False).result(PATIENCE_S)
        one, two = (json.loads((tmp_path / name / "checkpoint.json").read_text()) for name in ("one", "two"))
        files = {name: entry for name, entry in two["files"].items() if not name.endswith(".calls")}
        assert files == {name: entry for name, entry in one["files"].items() if not name.endswith(".calls")}
        assert len(files) >= 4
        assert spawn(roles, restore=tmp_path / "two").role("halved", HalfSaver).add(0) == [5, 5]

    def test_random_states_match_request_time(self, spawn: Spawn, tmp_path: Path) -> None:
        """Random states are saved as of the checkpoint's request, whatever is drawn during the write."""
        pytest.importorskip("torch")
        with Gate() as gate:
            roles: dict[str, RoleSpec[Any]] = {
                "halved": colocate.role(HalfSaver, gate.address),
                "drawing": colocate.role(Drawing),
            }
            group = spawn(roles)
            drawing = group.role("drawing", Drawing)
            drawing.draw()
            saving = group.checkpoint(tmp_path / "one", wait=False)
            gate.wait_for(2)
            drawn = [drawing.draw() for _ in range(2)]
            gate.open()
            saving.result(PATIENCE_S)
        group.restore(tmp_path / "one")
        assert [drawing.draw() for _ in range(2)] == drawn

    def test_one_at_a_time(self, halved: Callable[..., ColocatedGroup], tmp_path: Path) -> None:
        """A second checkpoint, or a restore, waits for a running checkpoint."""
        with Gate() as gate, ThreadPoolExecutor(2) as pool:
            group = halved(gate)
            role = group.role("halved", HalfSaver)
            saving = group.checkpoint(tmp_path / "one", tag=1, wait=False)
            gate.wait_for(2)
            role.become()
            role.add()
            next_one = pool.submit(lambda: group.checkpoint(tmp_path / "one", tag=2, wait=False))
            with pytest.raises(TimeoutError):
                next_one.result(0.2)
            gate.open()
            saving.result(PATIENCE_S)
            next_one.result(PATIENCE_S).result(PATIENCE_S)
        assert read_tag(tmp_path / "one") == 2
        with Gate() as gate, ThreadPoolExecutor(1) as pool:
            role.become(gate=gate.address)
            group.checkpoint(tmp_path / "two", tag=3, wait=False)
            gate.wait_for(2)
            restoring = pool.submit(group.restore, tmp_path / "one")
            with pytest.raises(TimeoutError):
                restoring.result(0.2)
            gate.open()
            assert restoring.result(PATIENCE_S) == 2
        assert read_tag(tmp_path / "two") == 3

    def test_failed_checkpoint_is_reported(self, halved: Callable[..., ColocatedGroup], tmp_path: Path) -> None:
        """A failed checkpoint keeps the earlier one, and is reported to a waiter, the next checkpoint or the close."""
        group = halved()
        role = group.role("halved", HalfSaver)
        group.checkpoint(tmp_path / "one", tag="before")
        role.become("fails")
        saving = group.checkpoint(tmp_path / "one", wait=False)
        error = saving.exception(PATIENCE_S)
        assert isinstance(error, RoleError)
        assert "halved.save raised OSError on rank 1" in str(error)
        assert (error.role, error.method, error.rank) == ("halved", "save", 1)
        del saving, error
        group.checkpoint(tmp_path / "one", tag="unasked", wait=False)
        role.become()
        with pytest.raises(RoleError, match="the disk is full") as caught:
            group.checkpoint(tmp_path / "one", tag="next")
        assert "that was the checkpoint 'unasked'" in caught.value.__notes__[-1]
        assert read_tag(tmp_path / "one") == "before"
        group.checkpoint(tmp_path / "one", tag="next")
        role.become("fails")
        group.checkpoint(tmp_path / "one", tag="last", wait=False)
        with pytest.raises(ExceptionGroup) as closed:
            group.close()
        assert closed.group_contains(RoleError, match="the disk is full")
        assert read_tag(tmp_path / "one") == "next"
        assert [path.name for path in tmp_path.iterdir()] == ["one"]

    @pytest.mark.parametrize("wait", [True, False])
    def test_other_halves(self, halved: Callable[..., ColocatedGroup], tmp_path: Path, wait: bool) -> None:
        """Code after a second `yield` runs once all ranks have written; a `save` may end before its first `yield`."""
        with Gate() as gate:
            group = halved(how="all")
            role = group.role("halved", HalfSaver)
            role.add(7)

            def checkpoint() -> None:
                call: Call[None] | None = group.checkpoint(tmp_path / "one", wait=wait)
                if call is not None:
                    call.result(PATIENCE_S)

            checkpoint()
            assert (tmp_path / "one" / "halved" / "all").read_text() == "77"
            role.become("all", gate.address, 1)
            with ThreadPoolExecutor(1) as pool:
                going = pool.submit(checkpoint)
                gate.wait_for()
                with pytest.raises(TimeoutError):
                    going.result(0.2)
                gate.open()
                going.result(PATIENCE_S)
        assert (tmp_path / "one" / "halved" / "all").read_text() == "77"
        role.become("nothing to write")
        checkpoint()
        group.restore(tmp_path / "one")
        assert role.add() == [8, 8]

    def test_close_waits_for_checkpoint(self, halved: Callable[..., ColocatedGroup], tmp_path: Path) -> None:
        """A close waits for a checkpoint within its grace; then the checkpoint fails and the earlier one stays."""
        with Gate() as gate, ThreadPoolExecutor(1) as pool:
            group = halved(gate)
            group.checkpoint(tmp_path / "one", tag="in time", wait=False)
            gate.wait_for(2)
            closing = pool.submit(group.close, PATIENCE_S)
            with pytest.raises(TimeoutError):
                closing.result(0.2)
            gate.open()
            closing.result(PATIENCE_S)
        assert read_tag(tmp_path / "one") == "in time"
        with Gate() as gate:
            group = halved(gate)
            group.checkpoint(tmp_path / "one", tag="late", wait=False)
            gate.wait_for(2)
            with pytest.raises(ExceptionGroup) as caught:
                group.close(grace=0.1)
            assert caught.group_contains(ClosedError, match="the checkpoint 'late' of group .* wasn't all written")
        assert read_tag(tmp_path / "one") == "in time"

    @needs(OwnProcess)
    @mark_executor_part
    def test_a_worker_dies_meanwhile(self, halved: Callable[..., ColocatedGroup], tmp_path: Path) -> None:
        """After a death amid a checkpoint the group restores the last complete one, and no partial files stay."""
        with Gate() as gate:
            group = halved(on_failure="restart")
            role = group.role("halved", HalfSaver)
            role.add(3)
            group.checkpoint(tmp_path / "one", tag="whole")
            role.add(4)
            role.become(gate=gate.address)
            saving = group.checkpoint(tmp_path / "one", tag="half", wait=False)
            gate.wait_for(2)
            with pytest.raises(GroupRestarted):
                role.kill(1)
            assert group.wait_ready(PATIENCE_S) == "whole"
            assert role.add(0) == [3, 3]
            assert isinstance(saving.exception(PATIENCE_S), GroupRestarted)
        group.checkpoint(tmp_path / "one", tag="next", wait=False).result(PATIENCE_S)
        assert read_tag(tmp_path / "one") == "next"
        assert [path.name for path in tmp_path.iterdir()] == ["one"]
