"""The command line on Ray and on Dask: a third party's roles from the same config, with one word changed."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
from ruamel.yaml import YAML
from tests.cli.conftest import CommandLine
from tests.engines.conftest import ENGINES, PACKAGES

from colocate.testing.waiting import wait_until

LOUD = "[policy/loud 0] here I am\n"
LONG_INTERRUPTED = (("ray", "all"), ("ray", "driver"), ("dask", "driver"))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param])
    return str(request.param)


@attrs.frozen
class Left:
    """The results that every executor must give: metrics without times, tables, owners and checkpoints."""

    metrics: list[Mapping[str, Any]]
    scores: list[str]
    owners: list[str]
    checkpoints: Mapping[str, str]


def run(colocate: CommandLine, *args: str) -> Left:
    done = colocate("run", "demo.yaml", *args, distributions=("acme",))
    assert (done.returncode, done.stderr) == (0, LOUD)
    lines = done.stdout.splitlines()
    start = lines.index("scores")
    (folder,) = (colocate.folder / "runs").iterdir()
    printed = (folder / "logs" / "policy-1.txt").read_text().splitlines()
    assert [line[24:] for line in printed if line[24:26] != "--"] == ["[loud 0] here I am"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert "report: runs/demo/report.html" in lines
    assert lines[-1] == "everything is closed: 1 runtime, 1 pool, 1 group, 2 workers, 3 roles"
    return Left(
        [{name: value for name, value in row.items() if name not in ("seconds", "time")} for row in rows],
        lines[start : lines.index("", start)],
        [line.strip() for line in lines if "role " in line and "rank" in line],
        {path.parent.name: path.read_text() for path in folder.glob("checkpoints/*/done.json")},
    )


@pytest.mark.parametrize("engine", [pytest.param("ray", marks=pytest.mark.long), "dask"], indirect=True)
def test_the_same_results_everywhere(colocate: CommandLine, tmp_path: Path, engine: str) -> None:
    """Metrics, tables and checkpoints of a run are the same on every executor, which prints no error."""
    here = run(attrs.evolve(colocate, folder=_copy(colocate, "here")), "--set", "executor.with.processes=true")
    there = run(attrs.evolve(colocate, folder=_copy(colocate, "there")), "--executor", engine)
    assert there == here
    assert len(here.metrics) == 3
    assert len(here.scores) == 5
    assert len(here.owners) == 3
    used = YAML(typ="safe", pure=True).load(tmp_path / "there" / "runs" / "demo" / "config.yaml")
    assert used["executor"]["use"] == engine


def _copy(colocate: CommandLine, name: str) -> Path:
    folder = colocate.folder / name
    folder.mkdir()
    for file in ("demo.yaml", "beside.py"):
        (folder / file).write_text((colocate.folder / file).read_text())
    return folder


def test_check(colocate: CommandLine, engine: str) -> None:
    """The plans of two executors differ only in the executor's line, and `check` starts no run."""
    plans = [
        colocate("check", "demo.yaml", "--executor", name, distributions=("acme",)).stdout for name in ("local", engine)
    ]
    assert f"\nexecutor  {engine} " in plans[1]
    here, there = ([line for line in plan.splitlines() if not line.startswith("executor")] for plan in plans)
    assert [line.split() for line in there] == [line.split() for line in here]
    assert not (colocate.folder / "runs").exists()


@pytest.mark.long
def test_check_of_options(colocate: CommandLine, engine: str) -> None:
    """`check` refuses an option that the executor doesn't have."""
    changes = ("--executor", engine, "--set", "executor.with.adress=auto")
    done = colocate("check", "demo.yaml", *changes, distributions=("acme",))
    assert done.returncode == 1
    assert f"executor {engine!r} has no parameter 'adress'" in done.stderr
    assert "did you mean 'address'?" in done.stderr


@pytest.mark.parametrize(
    ("engine", "fits"), [pytest.param("ray", True, marks=pytest.mark.long), ("dask", False)], indirect=["engine"]
)
def test_doctor(colocate: CommandLine, engine: str, fits: bool) -> None:
    """`doctor` reserves the pools on the executor, and reports whether they fit."""
    changes = ("executor.with.cpus=2", f"pools.main.slots={2 if fits else 3}")
    options = [part for change in changes for part in ("--set", change)]
    done = colocate("doctor", "demo.yaml", "--executor", engine, *options, distributions=("acme",))
    assert done.returncode == (0 if fits else 1)
    assert f"demo.yaml: {'works here' if fits else 'would not work here'}" in done.stdout
    assert ("can never fit" in done.stderr) is not fits


@pytest.mark.parametrize(
    ("engine", "whom"),
    [("dask", "all"), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG_INTERRUPTED)],
    indirect=["engine"],
)
def test_interrupted(colocate: CommandLine, engine: str, whom: str) -> None:
    """SIGINT to the driver, alone or with all processes, ends a run with a checkpoint from which another run resumes.

    No process is left, and nothing else is printed.
    """
    mark = uuid.uuid4().hex
    changes = ("--executor", engine, "--set", "job.with.steps=1000000")
    with colocate.start("run", "demo.yaml", *changes, distributions=("acme",), COLOCATE_TEST_MARK=mark) as running:
        assert running.stdout is not None
        next(line for line in running.stdout if line.startswith("step 2/"))
        assert len(_marked(mark)) > 2  # The driver and the workers run.
        (os.killpg if whom == "all" else os.kill)(running.pid, signal.SIGINT)
        out, err = running.communicate()
    assert running.returncode == 128 + signal.SIGINT
    said = f"{LOUD}SIGINT: stopping after a checkpoint (a second one ends it at once)\n"
    heard = [line for line in err.splitlines() if not line.startswith("[colocate] connect(")]  # Busy machines add this.
    assert sorted(heard) == sorted(said.splitlines())  # Worker lines come by another way, in any order.
    wait_until(lambda: _marked(mark) == [], "no process of it is left")
    (*_, last) = sorted((colocate.folder / "runs" / "demo" / "checkpoints").iterdir())
    step = int(last.name.partition("-")[2])
    assert out.splitlines()[-1] == f"stopped by SIGINT; saved up to step {step}, go on with --resume"
    more = ("--executor", "dask", "--set", f"job.with.steps={step + 1}")  # Any executor can resume.
    done = colocate("run", "demo.yaml", "--resume", *more, distributions=("acme",))
    assert (done.returncode, done.stderr) == (0, LOUD)
    assert f"going on after step {step}\nstep {step + 1}/{step + 1} " in done.stdout


def _marked(mark: str) -> list[str]:
    """Return the commands of the processes that have inherited the driver's environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("COLOCATE_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
