"""Checkpoints: what is in them, what they may replace, and what isn't one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import colocate
from colocate import RoleSpec
from colocate.errors import ConfigError, RoleError
from colocate.testing.executors._base import ExecutorCase, Spawn
from colocate.testing.gate import Gate
from colocate.testing.probes.lasting import (
    Called,
    Distributed,
    Exporting,
    HalfSaved,
    Lasting,
    Passing,
    Resizable,
)
from colocate.testing.waiting import PATIENCE_S


class Checkpoints(ExecutorCase):
    """`group.checkpoint`, `group.restore`, and `restore=`."""

    def test_a_checkpoint_is_whole_or_not_there(self, spawn: Spawn, tmp_path: Path) -> None:
        """A `save` that raises leaves what was there."""
        folder = tmp_path / "checkpoints" / "one"
        spawn({"lasting": colocate.role(Lasting)}).checkpoint(folder, tag="before")
        group = spawn({"lasting": colocate.role(Lasting, unsaved=True)})
        with pytest.raises(RoleError, match="the disk is full") as caught:
            group.checkpoint(folder)
        assert caught.value.rank == 1
        assert [path.name for path in folder.parent.iterdir()] == ["one"]
        assert '"before"' in (folder / "checkpoint.json").read_text()

    def test_what_a_checkpoint_never_replaces(
        self, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Everything else is refused before anything is touched, with what lies there and what to do."""
        group = spawn({"lasting": colocate.role(Lasting)}, slots=1)
        group.checkpoint(tmp_path / "mine")
        (tmp_path / "mine" / "notes.txt").write_text("kept")
        spawn({"other": colocate.role(Lasting)}, slots=1).checkpoint(tmp_path / "theirs")
        (tmp_path / "full" / "deep").mkdir(parents=True)
        (tmp_path / "full" / "work.py").write_text("print()")
        (tmp_path / "here" / "deeper").mkdir(parents=True)
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged" / "checkpoint.json").write_text("{")
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("kept")
        (tmp_path / "link").symlink_to(tmp_path / "empty")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.chdir(tmp_path / "here" / "deeper")
        cases = {
            "mine": r"other files beside a checkpoint \(notes.txt\)",
            "theirs": "other roles: it has other, this one saves lasting",
            "full": r"other files \(deep, work.py\)",
            "here/deeper": "working directory",
            "here": "working directory",
            "damaged": r"isn't what group.checkpoint\(...\) writes",
            "file": "a file",
            "file/inside": "file, in which it would lie, is no folder",
            "link": "a symbolic link .to .*empty",
            "dangling": "a symbolic link .to .*nowhere",
            "/proc": "a file system is mounted there",
        }
        for name, words in cases.items():
            with pytest.raises(ConfigError, match=words) as caught:
                group.checkpoint(tmp_path / name)
            assert "nothing was touched. Name a folder of its own" in str(caught.value)
        for name in (".", "..", "", "/", os.path.join("..", "..", "full")):
            with pytest.raises(ConfigError, match="can't be written to"):
                group.checkpoint(name)
        assert sorted(tmp_path.rglob("*")) == before
        assert (tmp_path / "mine" / "notes.txt").read_text() == "kept"

    def test_between_its_calls(self, spawn: Spawn, tmp_path: Path) -> None:
        """What was submitted before is in it."""
        group = spawn({"lasting": colocate.role(Lasting)})
        role = group.role("lasting", Lasting)
        with Gate() as gate:
            role.wait.submit(gate.address)
            role.add.submit()
            gate.wait_for(2)
        group.checkpoint(tmp_path / "one")
        role.add()
        restored = spawn({"lasting": colocate.role(Lasting)}, restore=tmp_path / "one")
        assert restored.wait_ready() == "one"
        assert restored.role("lasting", Lasting).add() == [2, 2]

    def test_several_at_once(self, spawn: Spawn, tmp_path: Path) -> None:
        """They are written one after the other, in whatever order; all succeed, and the last one is there."""
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(Lasting)}
        group = spawn(roles)
        role = group.role("lasting", Lasting)

        def save() -> None:
            for _ in range(5):
                role.add()
                group.checkpoint(tmp_path / "one")

        with ThreadPoolExecutor() as pool:
            for saving in [pool.submit(save) for _ in range(3)]:
                saving.result(PATIENCE_S)
        assert [path.name for path in tmp_path.iterdir()] == ["one"]
        assert spawn(roles, restore=tmp_path / "one").role("lasting", Lasting).add() == [16, 16]

    def test_roles_that_can_not_be_saved(self, spawn: Spawn, tmp_path: Path) -> None:
        """A role with half of the two methods, or a group without any that has them."""
        group = spawn({"half": colocate.role(HalfSaved), "lasting": colocate.role(Lasting)}, slots=1)
        with pytest.raises(ConfigError, match=r"HalfSaved has save\(\) but no restore\(\)"):
            group.checkpoint(tmp_path / "one")
        group = spawn({"passing": colocate.role(Passing)}, slots=1)
        with pytest.raises(ConfigError, match="none has save"):
            group.checkpoint(tmp_path / "one")
        group = spawn({"exporting": colocate.role(Exporting)}, slots=1)
        with pytest.raises(ConfigError, match=r"Exporting.save is a @method with OnRank\(0\)") as caught:
            group.checkpoint(tmp_path / "one")
        assert "Exporting.restore is a @method with (step, directory)" in str(caught.value)
        assert not list(tmp_path.iterdir())

    def test_what_is_no_checkpoint(self, spawn: Spawn, tmp_path: Path) -> None:
        """A folder without one, and one of other roles."""
        with pytest.raises(ConfigError, match="no checkpoint in"):
            spawn({"lasting": colocate.role(Lasting)}, slots=1, restore=tmp_path)
        group = spawn({"lasting": colocate.role(Lasting)}, slots=1)
        group.checkpoint(tmp_path / "one")
        with pytest.raises(ConfigError, match="other roles: it has lasting"):
            spawn({"passing": colocate.role(Passing)}, slots=1, restore=tmp_path / "one")

    def test_of_another_number_of_ranks(self, spawn: Spawn, tmp_path: Path) -> None:
        """Refused, unless the role can go on from that: it says so, or its files do."""
        roles: dict[str, RoleSpec[Any]] = {
            "resizable": colocate.role(Resizable),
            "distributed": colocate.role(Distributed),
            "lasting": colocate.role(Lasting),
        }
        group = spawn(roles)
        group.role("resizable", Resizable).add(3)
        group.role("distributed", Distributed).add(5)
        group.checkpoint(tmp_path / "one")
        with pytest.raises(ConfigError, match="is of 2 ranks of role 'lasting', which has 1 here: restore it with 2"):
            spawn(roles, slots=1, restore=tmp_path / "one")
        group = spawn({**roles, "lasting": roles["lasting"].on(slots=[0, 2])}, slots=3, restore=tmp_path / "one")
        assert group.role("resizable", Resizable).add(0) == [6, 6, 6]
        assert group.role("distributed", Distributed).add(0) == [5, 5, 5]

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tag": 1}', "\0"])
    def test_what_is_a_damaged_checkpoint(self, spawn: Spawn, tmp_path: Path, text: str) -> None:
        """One that can't be read, or that something else has written."""
        (tmp_path / "checkpoint.json").write_text(text)
        with pytest.raises(ConfigError, match="damaged, or something else's"):
            spawn({"lasting": colocate.role(Lasting)}, slots=1, restore=tmp_path)

    def test_a_checkpoint_whose_replacement_was_interrupted(self, spawn: Spawn, tmp_path: Path) -> None:
        """It is found where it is, by who only reads, and replaced by who writes."""
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(Lasting)}
        group = spawn(roles)
        group.role("lasting", Lasting).add()
        group.checkpoint(tmp_path / "one")
        (tmp_path / "one").rename(tmp_path / ".old-one")
        assert spawn(roles, restore=tmp_path / "one").role("lasting", Lasting).add() == [2, 2]
        group.restore(tmp_path / "one")
        assert [path.name for path in tmp_path.iterdir()] == [".old-one"]
        group.checkpoint(tmp_path / "one")
        assert [path.name for path in tmp_path.iterdir()] == ["one"]

    @pytest.mark.parametrize("cls", [Lasting, Called])
    def test_a_group_goes_on_from_a_checkpoint(self, spawn: Spawn, tmp_path: Path, cls: type[Lasting]) -> None:
        """In the order of its calls; whatever it did before, and whether or not its callers may call `save` too."""
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(cls), "passing": colocate.role(Passing)}
        group = spawn(roles)
        role, passing = group.role("lasting", Lasting), group.role("passing", Passing)
        role.add(3)
        passing.add()
        group.checkpoint(tmp_path / "one", tag=7)
        assert role.add.submit(2).result(PATIENCE_S) == [5, 5]
        assert group.restore(tmp_path / "one") == 7
        assert (group.wait_ready(), role.add(), passing.add()) == (7, [4, 4], [2, 2])
        with pytest.raises(ConfigError, match="no checkpoint in"):
            group.restore(tmp_path)
        assert role.add() == [5, 5]
        with pytest.raises(colocate.errors.PipelineError), group.pipeline():
            group.restore(tmp_path / "one")
