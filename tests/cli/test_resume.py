"""`colocate run --resume` of jobs with group checkpoints: groups are restored from them, or the run fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cli.conftest import CommandLine

CONFIG = """
    pools:
      main: {slots: 2}
      other: {slots: 1}
    groups:
      policy:
        pool: main
        roles:
          counter: {use: "counting:Counter"}
    job: {use: "counting:job", with: {steps: 2, restores: false}}
"""
# `Counter` has plain hooks, `Called` role methods; one group is the config's, one the job's.
COUNTING = """
    import json
    from pathlib import Path
    from colocate import Role, method, role

    class Counter(Role):
        def __init__(self):
            self.count = 0
        @method
        def add(self):
            self.count += 1
            return self.count
        def save(self, directory):
            Path(directory, f"{self.ctx.rank}").write_text(str(self.count))
        def restore(self, directory):
            self.count = int(Path(directory, f"{self.ctx.rank}").read_text())

    class Called(Counter):
        @method
        def save(self, directory):
            super().save(directory)
        @method
        def restore(self, directory):
            super().restore(directory)

    def job(run, *, steps, restores, inside="policy", own=True):
        policy, done, groups = run.groups["policy"], 0, []
        if own:
            groups = [run.runtime.reserve(1).spawn({"counter": role(Called)}, name="own")]
        if run.resumed is not None:
            done = json.loads((run.resumed / "done.json").read_text())
            print("policy was restored from", policy.wait_ready())
            for group in groups if restores else ():
                print("own was restored from", group.restore(run.resumed / "own"))
        for step in range(done + 1, done + steps + 1):
            counts = {group.name: group["counter"].add()[-1] for group in (policy, *groups)}
            with run.checkpoint(step) as directory:
                policy.checkpoint(directory / inside if inside else directory, tag=f"step {step}")
                for group in groups:
                    group.checkpoint(directory / group.name, tag=step)
                (directory / "done.json").write_text(json.dumps(step))
            run.log(step, **counts)
"""


@pytest.fixture
def begun(colocate: CommandLine) -> CommandLine:
    """Run the job for two steps."""
    colocate.write("counting.py", COUNTING)
    colocate.write("demo.yaml", CONFIG)
    done = colocate("run", "demo.yaml")
    assert done.returncode == 0, done.stderr
    return colocate


def rows(colocate: CommandLine) -> list[dict[str, Any]]:
    lines = (colocate.folder / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "time")} for line in lines]


def test_resume_restores_groups(begun: CommandLine) -> None:
    """A resume restores the config's group before the job runs, and the job's own group when the job restores it.

    A group that the job doesn't restore may not write a checkpoint, which would replace the earlier one.
    """
    done = begun("run", "demo.yaml", "--resume")
    assert done.returncode == 1
    assert "group 'own' wasn't restored, though the resumed run has a checkpoint of this group in " in done.stderr
    assert "step-000002/own" in done.stderr
    done = begun("run", "demo.yaml", "--resume", "--set", "job.with.restores=true")
    assert done.returncode == 0, done.stderr
    assert "policy was restored from step 2" in done.stdout
    assert "own was restored from 2" in done.stdout
    assert rows(begun) == [{"step": step, "policy": step, "own": step} for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("inside", ["", "deep/er"])
def test_group_checkpoint_is_found_at_any_depth(colocate: CommandLine, inside: str) -> None:
    """A group's checkpoint is found at any depth of the run's checkpoint, or as the run's checkpoint itself."""
    colocate.write("counting.py", COUNTING)
    colocate.write("demo.yaml", CONFIG)
    changes = ("--set", f"+job.with.inside={json.dumps(inside)}", "--set", "+job.with.own=false")
    for how in ((), ("--resume",)):
        done = colocate("run", "demo.yaml", *how, *changes)
        assert done.returncode == 0, done.stderr
    assert rows(colocate)[-1] == {"step": 4, "policy": 4}


def test_one_that_lies_elsewhere(colocate: CommandLine) -> None:
    """A group's checkpoint outside of the run's checkpoint is reported."""
    colocate.write("counting.py", COUNTING)
    colocate.write("demo.yaml", CONFIG)
    elsewhere = colocate.folder / "elsewhere"
    done = colocate("run", "demo.yaml", "--set", f"+job.with.inside={elsewhere}", "--set", "+job.with.own=false")
    assert done.returncode == 0, done.stderr
    assert f"group policy was checkpointed to {elsewhere}, outside of the run's checkpoint" in done.stdout + done.stderr


KILLED = """
    import os, signal
    from pathlib import Path
    from colocate._system import files
    from counting import Counter

    def save(run, step, wait):
        with run.checkpoint(step) as directory:
            run.groups["policy"].checkpoint(directory / "policy", wait=wait)

    def job(run, *, wait, kill=None):
        counter = run.groups["policy"]["counter"]
        print("begins at", run.resumed and run.resumed.name, counter.add())
        if kill is None:
            return
        save(run, 5, True)
        counter.add()
        if kill == "renames":  # as on a file system that can't exchange two names
            files._exchange = lambda path, other: False
        rename, last = Path.rename, {"renames": "step-000005", "exchange": ".part-step-000005"}[kill]

        def rename_and_die(path, other):
            rename(path, other)
            if path.name.startswith(last):
                os.kill(os.getpid(), signal.SIGKILL)

        Path.rename = rename_and_die
        save(run, 5, wait)
        run._checkpoints.settle()
"""


@pytest.mark.in_make_test("--resume=auto-renames-2-true", "--resume-exchange-3-false")
@pytest.mark.parametrize("wait", ["true", "false"])
@pytest.mark.parametrize(("kill", "count"), [("renames", 2), ("exchange", 3)])
@pytest.mark.parametrize("resume", ["--resume", "--resume=auto"])
def test_killed_as_the_checkpoint_of_a_step_is_replaced(
    colocate: CommandLine, wait: str, kill: str, count: int, resume: str
) -> None:
    """After a kill amid a checkpoint's replacement, the next run resumes from the old or the new one, and cleans up."""
    colocate.write("counting.py", COUNTING)
    colocate.write("killed.py", KILLED)
    colocate.write(
        "demo.yaml",
        CONFIG.replace('"counting:job", with: {steps: 2, restores: false}', f'"killed:job", with: {{wait: {wait}}}'),
    )
    assert colocate("run", "demo.yaml", "--set", f"job.with.kill={kill}").returncode == -9
    done = colocate("run", "demo.yaml", resume)
    assert done.returncode == 0, done.stderr
    assert f"begins at step-000005 [{count}, {count}]" in done.stdout
    assert [path.name for path in (colocate.folder / "runs" / "demo" / "checkpoints").iterdir()] == ["step-000005"]
