"""Roles of a config that are recorded, replayed and compared, and `colocate recordings`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import CommandLine
from tests.distributions.install import Installed
from tests.forked import Forks

ROOT = Path(__file__).parents[2]
SECRET = "--set", "groups.players.roles.judge.with.secret=cccc"  # guessed in step 6; the file's secret in step 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, installed: Installed, forks: Forks) -> Path:
    """Return a folder with the example, and with a recording of the guesser and the judge in `runs/words`."""
    colocate = CommandLine(tmp_path_factory.mktemp("words"), installed, forks)
    for name in ("words.py", "words.yaml"):
        shutil.copy(ROOT / "docs" / "examples" / name, colocate.folder)
    done = colocate("run", "words.yaml", "--record", "guesser", "--record", "judge", *SECRET)
    assert (done.returncode, done.stderr) == (0, "")
    return colocate.folder


@pytest.fixture
def words(colocate: CommandLine, recorded: Path) -> CommandLine:
    """Copy the recorded folder for one test."""
    shutil.copytree(recorded, colocate.folder, dirs_exist_ok=True)
    return colocate


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key in ("step", "score")} for line in lines]


def test_recorded_calls_are_listed(words: CommandLine) -> None:
    done = words("recordings", "runs/words")
    assert [line.split()[:5] for line in done.stdout.splitlines()[3:]] == [
        ["guesser", "guess", "2", "6", "0"],
        ["guesser", "learn", "2", "6", "0"],
        ["judge", "score", "2", "6", "0"],
    ]
    calls = json.loads(words("recordings", "runs/words", "--role", "guesser", "--json").stdout)["calls"]
    assert [call["method"] for call in calls] == ["guess", "learn"] * 6
    assert [call["place"] for call in calls] == [*range(12)]
    assert all(call["bytes"] > 100 for call in calls)
    assert {call["not recorded"] for call in calls} == {None}
    done = words("recordings", "runs/words", "--role", "gueser")
    assert (done.returncode, done.stdout) == (1, "")
    assert "did you mean 'guesser'" in done.stderr
    assert "there is no recording in" in words("recordings", "runs").stderr


@pytest.mark.parametrize("processes", ["false", "true"])
def test_a_replayed_run_is_the_same(words: CommandLine, processes: str) -> None:
    """A replayed run logs the recorded scores, although the config's judge has another secret."""
    changes = ["--set", f"executor.with.processes={processes}"]
    done = words("run", "words.yaml", "--replay", "guesser=runs/words", "--replay", "judge=runs/words", *changes)
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(words.folder / "runs" / "words-2") == rows(words.folder / "runs" / "words")


def test_a_run_that_differs(words: CommandLine) -> None:
    """With another secret the judge's scores differ: a replay and a comparison fail, and name the first difference."""
    done = words("run", "words.yaml", "--replay", "guesser=runs/words")
    assert done.returncode == 1
    assert "guesser.learn, call 0: argument scores[" in done.stderr
    done = words("run", "words.yaml", "--replay", "guesser=runs/words", "--replay-loose")
    assert done.returncode == 0
    assert "guesser.learn, call 0: argument scores[" in done.stderr
    done = words("run", "words.yaml", "--compare", "judge=runs/words")
    assert done.returncode == 1
    assert "judge.score, call 0: its value[" in done.stderr
    assert "its arguments were the same" in done.stderr
    assert "begin here: judge.score, call 0: it was given the same" in done.stderr
    assert "judge compared with runs/words" in done.stdout
    told = (words.folder / "runs" / "words-4" / "comparison.json").read_text()
    (score,) = json.loads(told, parse_constant=pytest.fail)["players.judge"]
    assert (score["calls"], score["arguments"], score["missing"], score["left"]) == (4, 0, 0, 8)
    assert score["differ"] > 0
    assert score["origin"]["words"] == "judge.score, call 0: it was given the same"
    assert score["relative"] is None  # a ratio to 0 has no number in JSON


def test_a_run_that_is_the_same(words: CommandLine) -> None:
    done = words("run", "words.yaml", "--compare", "judge=runs/words", "--compare", "guesser=runs/words", *SECRET)
    assert (done.returncode, done.stderr) == (0, "")
    done = words("run", "words.yaml", "--compare", "judge=runs/words", *SECRET, "--set", "job.with.steps=0")
    assert done.returncode == 1, "it hasn't called the judge"


def test_the_call_to_begin_with(words: CommandLine) -> None:
    """The comparison names the first call that differs among all roles, and the parameter if its arguments differ."""
    both = ["--compare", "guesser=runs/words", "--compare", "judge=runs/words"]
    done = words("run", "words.yaml", *both)
    assert done.stderr.count("begin here: ") == 1
    assert "begin here: judge.score, call 0: it was given the same" in done.stderr
    done = words("run", "words.yaml", "--compare", "guesser=runs/words")
    assert "begin here: guesser.learn, call 0, parameter scores: it was given something else" in done.stderr


def test_replay_starts_at_given_step(words: CommandLine) -> None:
    """`--replay-from` answers the first call with the recorded call of that step."""
    first = rows(words.folder / "runs" / "words")
    options = ["--replay", "guesser=runs/words", "--replay", "judge=runs/words", "--replay-loose"]
    done = words("run", "words.yaml", *options, "--replay-from", "4", "--set", "job.with.steps=2")
    assert done.returncode == 0
    assert [row["score"] for row in rows(words.folder / "runs" / "words-2")] == [row["score"] for row in first[3:5]]
    done = words("run", "words.yaml", *options, "--replay-from", "40")
    assert "has no step 40: it has 1 to 6" in done.stderr


def test_invalid_options_are_refused_before_start(words: CommandLine) -> None:
    done = words("run", "words.yaml", "--record", "gueser", "--record-limit", "much", "--replay-from", "3")
    assert done.returncode == 1
    for text in (
        "record[0]: there is no role 'gueser': there are guesser, judge",
        "'much' is no size",
        "replay_from: is of roles that are replayed or compared, and there are none",
    ):
        assert text in done.stderr
    done = words("run", "words.yaml", "--record-limit", "2MiB", "--replay-loose", "--tolerance", "0.1")
    assert done.returncode == 1
    for key, are in ("record_limit", "recorded"), ("replay_loose", "replayed"), ("tolerance", "compared"):
        assert f"{key}: is of roles that are {are}, and there are none" in done.stderr
    for wrong in "nan", "-1", "inf":
        done = words("run", "words.yaml", f"--tolerance={wrong}")
        assert f"--tolerance must be a number from 0 to 1,000,000, not {float(wrong)}; 1e-5, say" in done.stderr
    both = ["--replay", "judge=runs/words", "--compare", "judge=runs/words"]
    assert "compare.judge: is replayed: there is nothing to compare" in words("run", "words.yaml", *both).stderr
    assert "write --replay role=runs/first" in words("run", "words.yaml", "--replay", "judge").stderr
    done = words("run", "words.yaml", "--replay", "judge=runs/wrds", "--compare", "guesser=.", "--replay-from=-2")
    for text in (
        "replay.judge: there is no recording in",
        "compare.guesser: there is no recording in",
        "replay_from: must be a whole number",
    ):
        assert text in done.stderr
    twice = words("run", "words.yaml", "--replay", "judge=runs/words", "--replay", "judge=runs/other")
    assert "judge is given twice" in twice.stderr
    assert not (words.folder / "runs" / "words-2").exists()
