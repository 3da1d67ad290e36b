"""`colocate run --profile` writes some steps of a run to a file and a table; wrong options fail before the job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cli.conftest import CommandLine

JOB = """
import os, signal, time
import colocate

class Worker(colocate.Role):
    @colocate.method
    def work(self):
        time.sleep(0.2)

def job(run, steps, dies=0):
    group = run.groups["policy"]
    for step in range(1, steps + 1):
        group["worker"].work()
        if step == dies:
            group.run(lambda ctx: os.kill(os.getpid(), signal.SIGKILL))
        time.sleep(0.1)
        run.log(step)
"""
CONFIG = """
executor: {use: local, with: {processes: true}}
pools: {main: {slots: 1}}
groups: {policy: {pool: main, roles: {worker: "beside:Worker"}}}
job: {use: "beside:job", with: {steps: 4}}
"""


@pytest.fixture
def demo(colocate: CommandLine) -> CommandLine:
    colocate.write("beside.py", JOB)
    colocate.write("demo.yaml", CONFIG)
    return colocate


def spans(demo: CommandLine) -> list[Any]:
    found = json.loads((demo.folder / "runs" / "demo" / "profile.json").read_text())
    return [each for each in found if each["name"] == "worker.work" and each.get("cat") == "worker"]


@pytest.mark.in_make_test("2:3-2")
@pytest.mark.parametrize(("steps", "calls"), [("2:3", 2), ("3", 1), ("0:1", 1), ("4:9", 1)])
def test_steps(demo: CommandLine, steps: str, calls: int) -> None:
    """A profile has exactly the chosen steps, even if the run ends earlier; its table has their durations."""
    done = demo("run", "demo.yaml", "--profile", f"steps={steps},roles=worker")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(spans(demo)) == calls
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("worker.work  ")]
    assert int(row[1]) == calls
    assert float(row[3]) == pytest.approx(0.2 * calls, abs=0.1)
    (whole,) = [line.split() for line in done.stdout.splitlines() if line.startswith("all  ")]
    assert float(whole[2]) == pytest.approx(0.3 * calls, abs=0.15)
    page = (demo.folder / "runs" / "demo" / "report.html").read_text()
    assert "Profile of step" in page
    assert "for ui.perfetto.dev: " in done.stdout


@pytest.mark.parametrize(
    ("steps", "why"),
    [("7", "the run has ended before its step 7"), ("1", "step 1 is the first that was logged, and steps=0 begins")],
)
def test_a_step_that_never_comes(demo: CommandLine, steps: str, why: str) -> None:
    done = demo("run", "demo.yaml", "--profile", f"steps={steps}")
    assert done.returncode == 0
    assert f"nothing was profiled: {why}" in done.stdout
    assert not (demo.folder / "runs" / "demo" / "profile.json").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--profile", "steps=1,roles=wroker"], "no role 'wroker'"),
        (["--profile", "steps=three"], "steps and ranks are whole numbers"),
        (["--profile", "steps=1", "--set", "executor.with.processes=false"], "executor.with.processes=true"),
        (["--profile", "steps=1,memory"], "none of these ranks has a GPU"),
    ],
)
def test_impossible_profile_is_refused(demo: CommandLine, options: list[str], why: str) -> None:
    """A profile that isn't possible is refused before the job begins."""
    done = demo("run", "demo.yaml", *options)
    assert done.returncode == 1
    assert why in done.stderr
    assert not (demo.folder / "runs" / "demo" / "metrics.jsonl").exists()


def test_worker_death_during_profile_fails_run(demo: CommandLine) -> None:
    """A worker that dies during a profile fails the run, and leaves no partial profile."""
    done = demo("run", "demo.yaml", "--profile", "steps=1:3", "--set", "job.with.dies=2")
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr
    assert not [path.name for path in (demo.folder / "runs" / "demo").iterdir() if "profile" in path.name]
