"""A run's folder: names, metrics, and checkpoints that are complete or absent."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colocate.config import load_config
from colocate.errors import ConfigError
from colocate_run.folder import RunFolder


def killed_at_each_step(path: Path, scenario: str) -> list[dict[str, Any]]:
    """Return the report of `tests.cli.killed` on each kill."""
    command = [sys.executable, "-m", "tests.cli.killed", str(path), scenario]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def make(root: Path, name: str, *steps: int) -> RunFolder:
    folder = RunFolder.create(name, root)
    folder.write_file("config.yaml", load_config({"name": name}).dump())
    for step in steps:
        with folder.write_checkpoint(step) as directory:
            (directory / "state").write_text(str(step))
    return folder


class TestCheckpoints:
    def test_one_that_fails_leaves_nothing_and_the_last_stays(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo", 1)

        def fail() -> None:
            with folder.write_checkpoint(2) as directory:
                (directory / "half").write_text("")
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            fail()
        assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step-000001"]

    def test_partial_checkpoint_of_killed_run_is_removed(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo", 1)
        killed = subprocess.Popen([sys.executable, "-c", ""])
        killed.wait()
        half = folder.path / "checkpoints" / f".part-step-000002-{killed.pid}-1"
        half.mkdir()
        (half / "half").write_text("")
        assert [step for step, _ in folder.list_checkpoints()] == [1]
        with folder.write_checkpoint(2) as directory:
            assert list(directory.iterdir()) == []
        assert sorted(path.name for path in (folder.path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]

    def test_the_same_step_is_replaced(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo", 1)
        with folder.write_checkpoint(1) as directory:
            (directory / "other").write_text("")
        ((_, path),) = folder.list_checkpoints()
        assert [each.name for each in path.iterdir()] == ["other"]

    @pytest.mark.in_make_test("exchange")
    @pytest.mark.parametrize("scenario", ["exchange", "renames", "next"])
    def test_kills_at_each_step_of_a_replacement(self, tmp_path: Path, scenario: str) -> None:
        """A kill leaves the old checkpoint or the new one, whole, for all readers; the next driver cleans up."""
        kills = killed_at_each_step(tmp_path, scenario)
        replaced = {6: "new", 5: "old"} if scenario == "next" else {5: "new"}
        for kill in kills:
            assert kill["reader"] == kill["next"]
            assert {"torn"}.isdisjoint(text.partition(":")[0] for text in kill["reader"].values())
            assert kill["reader"]["5"] in ("old", "new")
            assert set(kill["tidy"]) == {f"step-{int(step):06d}" for step in kill["reader"]}
            if scenario != "renames":
                assert "step-000005" in kill["names"]
        texts = [tuple(kill["reader"].items()) for kill in kills]
        assert dict(texts[0]) == {"1": "old", "5": "old"}
        assert {int(step): text for step, text in texts[-1]}.items() >= replaced.items()
        assert len(kills) > 15

    def test_the_folder_of_another_machine(self, tmp_path: Path) -> None:
        """`remove_unfinished` removes another machine's partial checkpoint, which a new checkpoint leaves."""
        folder = make(tmp_path, "demo", 1)
        half = folder.path / "checkpoints" / ".part-step-000002-1-1@elsewhere"
        half.mkdir()
        with folder.write_checkpoint(2):
            pass
        assert half.exists()
        folder.remove_unfinished()
        assert not half.exists()
        assert [step for step, _ in folder.list_checkpoints()] == [1, 2]


class TestResuming:
    def test_the_newest_folder_with_a_complete_checkpoint(self, tmp_path: Path) -> None:
        make(tmp_path, "demo", 1)
        second = make(tmp_path, "demo", 2)
        make(tmp_path, "demo")
        assert RunFolder.find_latest("demo", tmp_path).path == second.path

    def test_a_folder_of_a_config_that_is_called_like_a_second_run(self, tmp_path: Path) -> None:
        first = make(tmp_path, "demo", 1)
        other = make(tmp_path, "demo-2", 5)
        assert RunFolder.find_latest("demo", tmp_path).path == first.path
        assert RunFolder.find_latest("demo-2", tmp_path).path == other.path

    @pytest.mark.parametrize(
        "name", ["2026-11-29", "0042", "1.5", "1e5", "null", "true", "0x10", "12_000", "no", "_.-", "ä"]
    )
    def test_run_with_ambiguous_yaml_name_is_found(self, tmp_path: Path, name: str) -> None:
        """A run whose name YAML would read as a date, number or null is found, whichever way it is quoted."""
        folder = make(tmp_path, name, 1)
        assert RunFolder.find_latest(name, tmp_path).path == folder.path
        folder.write_file("config.yaml", f'# a note\n"name":   "{name}" # another\n')
        assert RunFolder.find_latest(name, tmp_path).path == folder.path

    @pytest.mark.parametrize("text", [b"", b"name: [demo", b"\xff\xfe", b"- demo", b"name: [[demo]]", b"[" * 10**5])
    def test_folder_with_unreadable_config_is_ignored(self, tmp_path: Path, text: bytes) -> None:
        """A folder whose config can't be read is no run of this name."""
        (make(tmp_path, "demo", 1).path / "config.yaml").write_bytes(text)
        with pytest.raises(ConfigError, match="nothing to resume"):
            RunFolder.find_latest("demo", tmp_path)

    def test_lines_of_metrics_that_are_none(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo", 1)
        lines = [b'{"step": 1}', b"\xff\xfe", b"[" * 10**5, b"{}", b'{"step": "2"}', b"\0" * 100]
        (folder.path / "metrics.jsonl").write_bytes(b"\n".join(lines))
        assert folder.rewind_metrics(2) == [{"step": 1}]

    def test_metrics_after_the_checkpoint_go(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo")
        for step in range(4):
            folder.append_metrics({"step": step, "reward": step / 2})
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "rew')  # killed while writing
        assert folder.rewind_metrics(2) == [{"step": step, "reward": step / 2} for step in range(3)]
        folder.append_metrics({"step": 3, "reward": 9})
        folder.close()
        lines = (folder.path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["reward"] for line in lines] == [0, 0.5, 1, 9]
