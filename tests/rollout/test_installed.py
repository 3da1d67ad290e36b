"""An engine that an installed distribution declares as an entry point of `colocate.engines`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine
from tests.distributions.install import Installed
from tests.forked import Forks

from colocate_rollout.testing import EngineSuite

pytest.importorskip("hatchling.build", reason="what builds distributions is not installed here")

DICE = """
    executor: {use: local, with: {processes: true}}
    plugins: {allow: [dice]}
    pools: {main: {slots: 2}}
    groups:
      policy:
        pool: main
        roles:
          rollout: {use: rollout.engine, with: {engine: dice, sides: 2}}
    job: "beside:throw"
"""
BESIDE = """
    def throw(run):
        rows = run.groups["policy"]["rollout"].generate([[7], [8], [9]], samples=4, sampling={"max_tokens": 5})
        found = [each for samples in rows for each in samples]
        assert {token for each in found for token in each.token_ids} == {0, 1}
        run.log(1, rows=len(found))
"""


class TestDice(EngineSuite):
    """The engine passes the suite by its name."""

    engine = "dice"

    @pytest.fixture(scope="class", autouse=True)
    @staticmethod
    def there(installed: Installed) -> Iterator[None]:
        """Put the distribution on the path."""
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(installed("acme")))
            yield


@pytest.fixture
def colocate(tmp_path: Path, installed: Installed, forks: Forks) -> CommandLine:
    command = CommandLine(tmp_path, installed, forks)
    command.write("demo.yaml", DICE)
    command.write("beside.py", BESIDE)
    return command


def test_config_names_installed_engine(colocate: CommandLine) -> None:
    """`doctor` finds an installed engine that a config names, and `run` uses the engine."""
    done = colocate("doctor", "demo.yaml", distributions=("acme",))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\ndemo.yaml: works here\n")
    assert ["dice", "engine", "acme", "1.0.0", "works"] in [line.split() for line in done.stdout.splitlines()]
    done = colocate("run", "demo.yaml", distributions=("acme",))
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads((colocate.folder / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["rows"] == 12


def test_plugins_command_shows_engine(colocate: CommandLine) -> None:
    """`colocate plugins` shows the engine and its options, and reports a hook that returns no engine."""
    listed = colocate("plugins", distributions=("acme",)).stdout
    assert ["dice", "engine", "acme", "1.0.0", "acme.dice"] in [line.split() for line in listed.splitlines()]
    done = colocate("plugins", "dice", distributions=("acme",))
    assert (done.returncode, done.stderr) == (0, "")
    first, about, *_, option = done.stdout.splitlines()
    assert first == "dice: engine, from acme 1.0.0 (acme.dice)"
    assert about == "Throws dice, whatever the prompt. (acme.dice:Dice)"
    assert option.split() == ["sides", "int", "6", "Of", "each."]
    done = colocate("plugins", "numb-engine", distributions=("broken",))
    assert done.returncode == 1
    assert "its hook colocate_engine() returned 7 (int), not a class of engines" in done.stderr


def test_config_mistakes_are_reported(colocate: CommandLine) -> None:
    """`check` and `doctor` report a config's unknown engine, unknown option and wrong value."""
    where = "line 9: groups.policy.roles.rollout.with"
    for change, said in (
        ("with.sides=two", f"{where}.sides: must be an integer, not the text 'two'"),
        ("with.engine=dicee", "no engine is called 'dicee' (installed: dice, transformers and vllm); did you mean"),
    ):
        done = colocate("check", "demo.yaml", "--set", f"groups.policy.roles.rollout.{change}", distributions=("acme",))
        assert done.returncode == 1
        assert said.removeprefix("line 9: ") in done.stderr
    colocate.write("demo.yaml", DICE.replace("sides", "side"))
    done = colocate("doctor", "demo.yaml", distributions=("acme",))
    assert done.returncode == 1
    assert f"{where}.side: engine 'dice' has no parameter 'side'; did you mean 'sides'?" in done.stderr
    colocate.write("demo.yaml", DICE)
    assert "no engine is called 'dice'" in colocate("check", "demo.yaml").stderr


@pytest.mark.parametrize("command", ["check", "doctor", "run"])
def test_engine_not_allowed_is_refused(colocate: CommandLine, command: str) -> None:
    """An engine whose plugin isn't in `plugins.allow` is refused by `check`, `doctor` and `run`."""
    colocate.write("demo.yaml", DICE.replace("[dice]", "[acme]"))
    done = colocate(command, "demo.yaml", distributions=("acme",))
    assert done.returncode == 1
    said = "with.engine: plugin 'dice' (acme 1.0.0) isn't in plugins.allow: add it there if you trust it"
    assert said in done.stderr
