"""Contents of checkpoints, folders that they may replace, and groups that are restored."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.suite.checkpoints.saving import SavingBeside
from tests.suite.core.restarting import do_nothing, kill_and_get_error
from tests.suite.marks import mark_executor_part
from tests.suite.probes.lasting import (
    CallableSaver,
    Distributed,
    Drawing,
    Exporting,
    HalfSaved,
    LaterSaver,
    PassingSaver,
    Resizable,
    SeededRole,
)

import colocate
from colocate import ColocatedGroup, RoleSpec
from colocate.errors import ConfigError, RoleError, RoleStartError
from colocate.executor import OwnProcess
from colocate.testing.executors._base import ExecutorCase, Spawn, needs, needs_feature
from colocate.testing.gate import Gate
from colocate.testing.probes.lasting import Lasting
from colocate.testing.waiting import PATIENCE_S


class Checkpoints(ExecutorCase):
    """`group.checkpoint`, `group.restore`, and `restore=`."""

    def test_a_checkpoint_is_whole_or_not_there(self, spawn: Spawn, tmp_path: Path) -> None:
        """A `save` that raises leaves the earlier checkpoint in place."""
        folder = tmp_path / "checkpoints" / "one"
        spawn({"lasting": colocate.role(Lasting)}).checkpoint(folder, tag="before")
        group = spawn({"lasting": colocate.role(Lasting, unsaved=True)})
        with pytest.raises(RoleError, match="the disk is full") as caught:
            group.checkpoint(folder)
        assert caught.value.rank == 1
        assert [path.name for path in folder.parent.iterdir()] == ["one"]
        assert '"before"' in (folder / "checkpoint.json").read_text()

    @pytest.mark.parametrize(
        "how",
        ["future", "thread", "attribute", "several", "response", "coroutine", "tasks", "another loop"],
    )
    def test_checkpoint_waits_for_all_results_of_save(self, spawn: Spawn, tmp_path: Path, how: str) -> None:
        """A checkpoint waits for all futures, threads, coroutines and tasks of `save`, returned or in an attribute."""
        with Gate() as gate, ThreadPoolExecutor(1) as pool:
            group = spawn({"later": colocate.role(LaterSaver, how, gate.address)})
            group.role("later", LaterSaver).add(3)
            saving = pool.submit(group.checkpoint, tmp_path / "one")
            gate.wait_for()
            with pytest.raises(TimeoutError):
                saving.result(0.3)
            assert not (tmp_path / "one").exists()
            gate.open()
            saving.result(PATIENCE_S)
        group.role("later", LaterSaver).add(1)
        group.restore(tmp_path / "one")
        assert group.role("later", LaterSaver).add(0) == [3, 3]

    @mark_executor_part
    def test_missing_files_fail_checkpoint(self, spawn: Spawn, tmp_path: Path) -> None:
        """Missing or incomplete files fail the checkpoint with a role's error, and the earlier checkpoint stays."""
        group = spawn({"later": colocate.role(LaterSaver, "process")})
        later = group.role("later", LaterSaver)
        group.checkpoint(tmp_path / "one", tag="before")
        with Gate() as gate:
            for how, words in [
                ("fails", "raised OSError on rank 1 .*the disk is full"),
                ("bad process", "has ended with exit code 3"),
                ("nothing", r"later.save\(\) is over on all ranks: there is no file in its folder"),
                ("parts", r"written later/net/__\d_0.distcp, and no .metadata beside it"),
                ("amid", "later/0 is open there, to be written"),
            ]:
                later.become(how, gate.address if how in ("nothing", "amid") else None)
                with pytest.raises(RoleError, match=words) as caught:
                    group.checkpoint(tmp_path / "one")
                if how == "fails":
                    assert (caught.value.rank, type(caught.value.__cause__)) == (1, OSError)
            gate.open()
        assert '"before"' in (tmp_path / "one" / "checkpoint.json").read_text()
        group.restore(tmp_path / "one")
        assert later.add() == [1, 1]

    def test_changed_files_are_refused(self, spawn: Spawn, tmp_path: Path) -> None:
        """A restore and a start refuse changed or missing files, and name the file."""
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(Lasting), "empty": colocate.role(Drawing)}
        group = spawn(roles)
        role = group.role("lasting", Lasting)
        role.add(41)
        group.checkpoint(tmp_path / "one")
        first, second = (tmp_path / "one" / "lasting" / str(rank) for rank in range(2))
        for path, text, words in [
            (first, "4", "lasting/0 has 1 bytes, and had 2"),
            (second, None, "lasting/1 isn't there"),
        ]:
            path.write_text(text) if text is not None else path.unlink()
            with pytest.raises(ConfigError, match=words):
                group.restore(tmp_path / "one")
            with pytest.raises(ConfigError, match=words):
                spawn(roles, restore=tmp_path / "one")
            path.write_text("41")
        second.write_text("14")
        with pytest.raises(RoleError, match="lasting/1 has other contents than it had"):
            group.restore(tmp_path / "one")
        with pytest.raises(RoleStartError, match="lasting/1 has other contents than it had"):
            spawn(roles, restore=tmp_path / "one")
        first.write_text("xx")  # Unreadable for the role.
        second.write_text("41")
        with pytest.raises(RoleError, match="lasting/0 has other contents than it had"):
            group.restore(tmp_path / "one")
        first.write_text("41")
        group.restore(tmp_path / "one")
        assert role.add() == [42, 42]

    def test_checkpoint_refuses_foreign_folder(
        self, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A checkpoint refuses a folder with other contents before changing anything, and says what is there."""
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

    def test_several_at_once(self, spawn: Spawn, tmp_path: Path) -> None:
        """Concurrent checkpoints to one folder all succeed, and the last one is there."""
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
        """A role with only one of `save` and `restore`, and a group without both methods, are refused."""
        group = spawn({"half": colocate.role(HalfSaved), "lasting": colocate.role(Lasting)}, slots=1)
        with pytest.raises(ConfigError, match=r"HalfSaved has save\(\) but no restore\(\)"):
            group.checkpoint(tmp_path / "one")
        group = spawn({"passing": colocate.role(PassingSaver)}, slots=1)
        with pytest.raises(ConfigError, match="none has save"):
            group.checkpoint(tmp_path / "one")
        group = spawn({"exporting": colocate.role(Exporting)}, slots=1)
        with pytest.raises(ConfigError, match=r"Exporting.save is a @method with OnRank\(0\)") as caught:
            group.checkpoint(tmp_path / "one")
        assert "Exporting.restore is a @method with (step, directory)" in str(caught.value)
        assert not list(tmp_path.iterdir())

    @needs_feature("functions")
    def test_calls_are_counted_on(self, spawn: Spawn, tmp_path: Path) -> None:
        """Call seeds are equal on all ranks and continue from a checkpoint, whatever is called in between.

        A call that fails before other ranks have begun counts on all ranks.
        """
        roles: dict[str, RoleSpec[Any]] = {"seeded": colocate.role(SeededRole)}

        def seeds(group: ColocatedGroup) -> list[int]:
            seeds_by_rank = [group.role("seeded", SeededRole).seed() for _ in range(2)]
            assert all(len({*rank_seeds}) == 1 for rank_seeds in seeds_by_rank)
            return [rank_seeds[0] for rank_seeds in seeds_by_rank]

        group = spawn(roles, name="counted")
        before = seeds(group)
        group.checkpoint(tmp_path / "one")
        with Gate() as gate:
            waiting = group.role("seeded", SeededRole).wait.submit([None, gate.address])
            gate.wait_for()
            with pytest.raises(RoleError, match="before the others have begun"):
                group.role("seeded", SeededRole).seed(fails=0)
            gate.open()
            waiting.result(PATIENCE_S)
        after = seeds(group)
        assert len({*before, *after}) == 4
        group.restore(tmp_path / "one")
        group.role("seeded", SeededRole).wait([None, None])
        again = seeds(group)
        assert len({*before, *again}) == 4
        assert again[1] == after[0]  # The seed of the call after the failed one.
        group.close()
        group = spawn(roles, name="counted", restore=tmp_path / "one")
        group.run(do_nothing)
        assert seeds(group) == again

    def test_of_another_number_of_ranks(self, spawn: Spawn, tmp_path: Path) -> None:
        """A restore with another number of ranks is refused, unless the role or its file format can resize."""
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

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tag": 1}', "\0", "[" * 100_000], ids=lambda text: text[:9])
    def test_damaged_checkpoint_is_refused(self, spawn: Spawn, tmp_path: Path, text: str) -> None:
        """A checkpoint file that is damaged, or of another program, is refused."""
        (tmp_path / "checkpoint.json").write_text(text)
        with pytest.raises(ConfigError, match="damaged, or something else's"):
            spawn({"lasting": colocate.role(Lasting)}, slots=1, restore=tmp_path)

    def test_interrupted_replacement_is_found_and_replaced(self, spawn: Spawn, tmp_path: Path) -> None:
        """A checkpoint whose replacement was interrupted is found by readers, and replaced by the next writer."""
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

    @pytest.mark.parametrize("cls", [Lasting, CallableSaver])
    @needs_feature("pipelines")
    def test_a_group_goes_on_from_a_checkpoint(self, spawn: Spawn, tmp_path: Path, cls: type[Lasting]) -> None:
        """A restore takes its place in the order of calls, also if callers may call `save`."""
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(cls), "passing": colocate.role(PassingSaver)}
        group = spawn(roles)
        role, passing = group.role("lasting", Lasting), group.role("passing", PassingSaver)
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

    @needs(OwnProcess)
    @mark_executor_part
    def test_roles_continue_from_last_checkpoint(self, lasting: Callable[..., ColocatedGroup], tmp_path: Path) -> None:
        """After a death roles continue from the last checkpoint in new workers; an unsavable role starts anew."""
        group = lasting(more={"passing": colocate.role(PassingSaver)})
        role, passing = group.role("lasting", Lasting), group.role("passing", PassingSaver)
        assert group.wait_ready() is None
        role.add()
        passing.add()
        group.checkpoint(tmp_path / "first")
        role.add()
        group.checkpoint(tmp_path / "second", tag=2)
        role.add()
        before = role.tell()
        error = kill_and_get_error(group, rank=1)
        assert (error.rank, error.signal, error.pid) == (1, "SIGKILL", before[1][2])
        assert group.wait_ready(PATIENCE_S) == 2
        after = role.tell()
        assert [(count, generation) for count, generation, _ in after] == [(2, 1), (2, 1)]
        assert not {pid for _, _, pid in before} & {pid for _, _, pid in after}
        assert passing.add() == [1, 1]
        assert (group.state, group.generation) == ("ready", 1)
        group.close()

    @needs(OwnProcess)
    def test_random_numbers_go_on(self, spawn: Spawn, tmp_path: Path) -> None:
        """A restarted group's random generators continue from the checkpoint."""
        pytest.importorskip("torch")
        roles: dict[str, RoleSpec[Any]] = {"lasting": colocate.role(Lasting), "drawing": colocate.role(Drawing)}
        group = spawn(roles, on_failure="restart")
        drawing = group.role("drawing", Drawing)
        first = drawing.draw()
        group.checkpoint(tmp_path / "checkpoint")
        second = drawing.draw()
        kill_and_get_error(group)
        group.wait_ready(PATIENCE_S)
        assert first != second
        assert drawing.draw() == second


AREAS = [Checkpoints, SavingBeside]
