"""A run's folder: names, metrics, checkpoints that are complete or not there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from colocate.config import load_config
from colocate.errors import ConfigError
from colocate_run.folder import RunFolder


def make(root: Path, name: str, *steps: int) -> RunFolder:
    folder = RunFolder.create(name, root)
    folder.write("config.yaml", load_config({"name": name}).dump())
    for step in steps:
        with folder.checkpoint(step) as directory:
            (directory / "state").write_text(str(step))
    return folder


class TestCheckpoints:
    def test_one_that_fails_leaves_nothing_and_the_last_stays(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo", 1)

        def fail() -> None:
            with folder.checkpoint(2) as directory:
                (directory / "half").write_text("")
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            fail()
        assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step-000001"]

    def test_what_a_killed_run_left_half_is_no_checkpoint_and_goes(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo", 1)
        killed = subprocess.Popen([sys.executable, "-c", ""])
        killed.wait()
        half = folder.path / "checkpoints" / f".part-step-000002-{killed.pid}-1"
        half.mkdir()
        (half / "half").write_text("")
        assert [step for step, _ in folder.checkpoints()] == [1]
        with folder.checkpoint(2) as directory:
            assert list(directory.iterdir()) == []
        assert sorted(path.name for path in (folder.path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]

    def test_the_same_step_is_replaced(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo", 1)
        with folder.checkpoint(1) as directory:
            (directory / "other").write_text("")
        ((_, path),) = folder.checkpoints()
        assert [each.name for each in path.iterdir()] == ["other"]


class TestResuming:
    def test_the_newest_folder_with_a_complete_checkpoint(self, tmp_path: Path) -> None:
        make(tmp_path, "demo", 1)
        second = make(tmp_path, "demo", 2)
        make(tmp_path, "demo")
        assert RunFolder.latest("demo", tmp_path).path == second.path

    def test_a_folder_of_a_config_that_is_called_like_a_second_run(self, tmp_path: Path) -> None:
        first = make(tmp_path, "demo", 1)
        other = make(tmp_path, "demo-2", 5)
        assert RunFolder.latest("demo", tmp_path).path == first.path
        assert RunFolder.latest("demo-2", tmp_path).path == other.path

    @pytest.mark.parametrize(
        "name", ["2026-11-29", "0042", "1.5", "1e5", "null", "true", "0x10", "12_000", "no", "_.-", "ä"]
    )
    def test_whatever_yaml_takes_its_name_for(self, tmp_path: Path, name: str) -> None:
        """A date, a number or null in quotes is a name; also where the file's author has written another form of it."""
        folder = make(tmp_path, name, 1)
        assert RunFolder.latest(name, tmp_path).path == folder.path
        folder.write("config.yaml", f'# a note\n"name":   "{name}" # another\n')
        assert RunFolder.latest(name, tmp_path).path == folder.path

    @pytest.mark.parametrize("text", [b"", b"name: [demo", b"\xff\xfe", b"- demo", b"name: [[demo]]", b"[" * 10**5])
    def test_a_folder_whose_config_is_none(self, tmp_path: Path, text: bytes) -> None:
        """It is no run of this name."""
        (make(tmp_path, "demo", 1).path / "config.yaml").write_bytes(text)
        with pytest.raises(ConfigError, match="nothing to resume"):
            RunFolder.latest("demo", tmp_path)

    def test_lines_of_metrics_that_are_none(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo", 1)
        lines = [b'{"step": 1}', b"\xff\xfe", b"[" * 10**5, b"{}", b'{"step": "2"}', b"\0" * 100]
        (folder.path / "metrics.jsonl").write_bytes(b"\n".join(lines))
        assert folder.rewind(2) == [{"step": 1}]

    def test_metrics_after_the_checkpoint_go(self, tmp_path: Path) -> None:
        folder = make(tmp_path, "demo")
        for step in range(4):
            folder.append({"step": step, "reward": step / 2})
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "rew')  # killed while writing
        assert folder.rewind(2) == [{"step": step, "reward": step / 2} for step in range(3)]
        folder.append({"step": 3, "reward": 9})
        folder.close()
        lines = (folder.path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["reward"] for line in lines] == [0, 0.5, 1, 9]
