"""Every example of every page runs, and prints the output that the page shows."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.docs.blocks import PAGES, ROOT, blocks_of
from tests.docs.pages import untrue
from tests.forked import Forks

from colocate import load_config

NOT_RUN: dict[tuple[str, str], int] = {
    ("README.md", "installs; tests/docs/test_first_hour.py does, in a fresh environment"): 2,
    ("README.md", "trains for about a minute; tests/docs/test_first_hour.py does"): 1,
    ("README.md", "trains for about a minute; the test test_the_commands_of_the_demo checks it"): 1,
    ("README.md", "trains for a minute; the test test_config_learns_as_shown does"): 1,
    ("configuration.md", "needs variables of Slurm's"): 1,
    ("dask.md", "needs a cluster"): 4,
    ("ray.md", "needs a cluster"): 3,
    ("ray.md", "one start of a Ray is enough for the tests of this page"): 1,
    ("from-verl.md", "verl and Ray are not installed with the tests"): 1,
    ("verl.md", "installs; tests/docs/test_first_hour.py does, in a fresh environment"): 1,
    ("verl.md", "needs GPUs and vLLM; `make verl-tests` runs main_ppo with other answers"): 1,
    ("verl.md", "verl is not installed with the tests; `make verl-tests` has it"): 3,
    ("bring-your-trainer.md", "accelerate is not installed with the tests; `make trainers` runs it"): 1,
    ("bring-your-trainer.md", "lightning-fabric is not installed with the tests; `make trainers` runs it"): 1,
    ("restart.md", "it trains for a minute"): 1,
    ("write-an-executor.md", "needs two machines; tests/conformance/test_outpost_hosts.py has two"): 1,
    ("bring-your-trainer.md", "it trains for more than a minute"): 1,
    ("detached-pools.md", "needs a cluster"): 1,
    ("look-inside.md", "needs a terminal; tests/cli/test_debug.py has one"): 2,
    ("cli.md", "needs a job that runs; tests/cli/test_logs.py has one"): 1,
    ("look-inside.md", "for an editor"): 1,
    ("cli.md", "needs a job that runs; tests/cli/test_top.py has one"): 1,
    ("memory.md", "trains for about a minute; the test test_with_a_budget does it with few steps"): 1,
    ("look-inside.md", "hangs; tests/cli/test_it_hangs.py runs it and the commands below"): 1,
    ("look-inside.md", "needs a job that hangs; tests/cli/test_it_hangs.py has one"): 3,
    ("memory.md", "needs a GPU"): 1,
    ("out-of-memory.md", "shows what is the machine's; tests/cli/test_out_of_memory.py runs it"): 2,
    ("observers.md", "a module of a distribution's"): 1,
    ("engines.md", "a module of a distribution's"): 1,
    ("engines.md", "needs an engine that generates by a model"): 1,
    ("gpu.md", "needs minutes"): 1,
    ("gpu.md", "needs a GPU"): 2,
}


# These pages take half a minute each: training, a Ray, runs of pytest.
LONG = ("from-your-script.md", "a-run-that-doesnt-learn.md", "profile.md", "ray.md", "testing.md")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] if page.name in LONG else []) for page in PAGES if blocks_of(page)],
    ids=lambda page: page.name,
)
def test_page_is_true(page: Path, tmp_path: Path, forks: Forks) -> None:
    """The steps of a page run, and print the output that the page shows."""
    wrong = list(untrue(page, tmp_path / "page", forks))
    assert not wrong, "\n\n".join(wrong)


def test_skipped_blocks_have_listed_reasons() -> None:
    """A block that isn't run gives a reason, which is in the list of this file."""
    found = Counter((page.name, block.not_run) for page in PAGES for block in blocks_of(page) if block.not_run)
    assert dict(found) == NOT_RUN
    assert all(block.not_run != "" for page in PAGES for block in blocks_of(page))


def test_the_commands_of_the_demo() -> None:
    """`make demo` runs the README's command, and its config loads with the README's options."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = next(line.strip() for line in printed.splitlines() if "colocate run" in line)
    assert f"$ {command.partition('/bin/')[2]}\n" in readme
    config = load_config(ROOT / command.split()[-1])
    assert config.job is not None
    commands = re.findall(r"(?:--(?:set|executor) [\w.]+(?:=\w+)?\s?)+", readme)
    assert len(commands) == 3
    for options in commands:
        executor = next(iter(re.findall(r"--executor (\S+)", options)), None)
        config = load_config(ROOT / command.split()[-1], executor=executor, set=re.findall(r"--set (\S+)", options))
        assert config.executor.use == (executor or "local")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_of_this_machine_is_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert str(ROOT) not in text
    assert sys.prefix not in text
    assert not re.search(rf"\b{re.escape(platform.node())}\b", text)


@pytest.mark.long
@pytest.mark.parametrize("executor", ["local", "ray", "dask"])
def test_a_transformers_model_under_fsdp2(executor: str, tmp_path: Path) -> None:
    """The example learns, and continues after a failed step."""
    example = str(ROOT / "docs" / "examples" / "fsdp2.py")
    done = subprocess.run([sys.executable, example, executor], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "step 10 failed on rank 1: a bad batch" in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3 < 3 < losses[0]


@pytest.mark.long
def test_the_config_of_the_readme_trains(tmp_path: Path) -> None:
    """The README's config trains, with trainer and engine in two processes."""
    (config,) = [block.text for block in blocks_of(ROOT / "README.md") if block.file == "grpo.yaml"]
    (tmp_path / "grpo.yaml").write_text(config)
    few = ["job.with.steps=2", "+job.with.warm_up_steps=0"]
    command = [
        sys.executable,
        "-m",
        "colocate",
        "run",
        "grpo.yaml",
        *(word for each in few for word in ("--set", each)),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "engine_gap" in (tmp_path / "runs" / "grpo" / "metrics.jsonl").read_text(encoding="utf-8")
    assert done.stdout.endswith("everything is closed: 1 runtime, 1 pool, 1 group, 2 workers, 6 roles\n")


def test_the_first_screen() -> None:
    """The README's status precedes its first example, which is run here and imports colocate alone."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = blocks_of(ROOT / "README.md")[0]
    assert 0 < readme.index("**Status**") < readme.index("```")
    assert first.file is not None
    assert first.not_run is None
    assert set(re.findall(r"^(?:import|from) (\w+)", first.text, re.MULTILINE)) == {"random", "colocate"}
    assert f"$ python {first.file}\n" in readme.partition(first.text)[2]


def test_the_example_trains_in_two_processes(tmp_path: Path, forks: Forks) -> None:
    """The page's example is data-parallel after the two changes that the page names."""
    (example,) = [block.text for block in blocks_of(ROOT / "docs" / "first-group.md") if block.file == "example.py"]
    changed = example.replace("slots=1", "slots=2, processes=True")
    assert changed.count("slots=2, processes=True") == 1
    (tmp_path / "example.py").write_text(changed, encoding="utf-8")
    done = forks.run((), tmp_path, os.environ, tmp_path / "example.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split(",")[0].removeprefix("score: ")) > 0.8
    assert "role reward rank 1/2" in done.stdout
