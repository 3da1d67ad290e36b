"""An observer of a distribution that is installed separately, named in a config."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine
from tests.cli.test_run import ACME
from tests.distributions.install import Installed
from tests.forked import Forks

from colocate import PluginError
from colocate._plugins.plugins import find_observer

SCRIBE = f"{ACME}\n    observe: [{{use: scribe, with: {{file: told.txt}}}}]\n"


@pytest.fixture
def command(tmp_path: Path, installed: Installed, forks: Forks) -> CommandLine:
    return CommandLine(tmp_path, installed, forks)


def test_installed_observer_gets_run_events(command: CommandLine) -> None:
    command.write("demo.yaml", SCRIBE)
    done = command("run", "demo.yaml", distributions=("acme",))
    assert (done.returncode, done.stderr) == (0, "")
    told = command.folder / "runs" / "demo" / "told.txt"
    first = ["demo starts with 1 group, after step None", "step 1", "step 2", "step 3", "over: 3 steps, None"]
    assert told.read_text().splitlines() == first
    more = ("--resume", "--set", "job.with.steps=4")
    assert command("run", "demo.yaml", *more, distributions=("acme",)).returncode == 0
    assert told.read_text().splitlines()[len(first) :] == [
        "demo starts with 1 group, after step 3",
        "step 4",
        "over: 4 steps, None",
    ]


def test_a_run_that_never_starts(command: CommandLine) -> None:
    """The observers of a run that never starts are notified of its end, with the error."""
    command.write("demo.yaml", SCRIBE)
    done = command("run", "demo.yaml", "--set", "executor.with.cpus=1", distributions=("acme",))
    assert done.returncode == 1
    last = (command.folder / "runs" / "demo" / "told.txt").read_text().splitlines()[-1]
    assert last.startswith("over: 0 steps, PlacementError(")


def test_mistakes(command: CommandLine) -> None:
    command.write("demo.yaml", SCRIBE.replace("file: told", "fil: told"))
    done = command("check", "demo.yaml", distributions=("acme",))
    assert done.returncode == 1
    assert "observe[0].with.fil: scribe has no parameter 'fil' (did you mean 'file'?)" in done.stderr
    done = command("plugins", "numb", distributions=("broken",))
    assert done.returncode == 1
    assert "its hook colocate_observer() returned 7 (int), not a class of observers" in done.stderr
    with pytest.raises(PluginError, match="no observer is called 'scrib'"):
        find_observer("scrib")
