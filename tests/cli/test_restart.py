"""`colocate run` with `on_failure: restart`: a job resumes from its last checkpoint, and ends as an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.cli.conftest import CommandLine

from colocate.worker.birth.template import MODE

CONFIG = """
    executor: {use: local, with: {processes: true}}
    pools:
      main: {slots: 2}
    groups:
      policy:
        pool: main
        roles:
          counter: {use: "counting:Counter"}
    job: {use: "counting:job", with: {steps: 6}}
"""
# Each step waits for a line on stdin, so that the test decides when a worker is killed.
COUNTING = """
    import json, sys
    from pathlib import Path
    from colocate import Role, method

    class Counter(Role):
        def __init__(self):
            self.count = 0
        @method
        def add(self, amount):
            self.count += amount
            return self.count
        def save(self, directory):
            Path(directory, f"{self.ctx.rank}.json").write_text(json.dumps(self.count))
        def restore(self, directory):
            self.count = json.loads(Path(directory, f"{self.ctx.rank}.json").read_text())
        @method
        def come_back(self, directory):
            self.restore(directory)
        @method
        def write(self, directory):
            self.save(directory)

    def job(run, *, steps, every=2):
        counter = run.groups["policy"]["counter"]
        done = 0
        if run.resumed is not None:
            done = json.loads((run.resumed / "done.json").read_text())
            counter.come_back(str(run.resumed))
        run.total(steps)
        for step in range(done + 1, steps + 1):
            sys.stdin.readline()
            run.log(step, count=counter.add(step)[0])
            if step % every == 0:
                with run.checkpoint(step) as directory:
                    counter.write(str(directory))
                    (directory / "done.json").write_text(json.dumps(step))
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def a_worker(pid: int) -> psutil.Process:
    """Return a worker process of a driver; not the template or a supervisor, whose death a worker survives."""
    processes = (p for p in psutil.Process(pid).children(recursive=True) if "colocate.worker" in p.cmdline())
    return next(p for p in processes if MODE not in p.cmdline() and not p.children())


@pytest.mark.parametrize("after", [1, 3, pytest.param(5, marks=pytest.mark.long)])
def test_a_killed_worker(colocate: CommandLine, after: int) -> None:
    """A run whose worker is killed, before or after a checkpoint, has the metrics of an undisturbed run."""
    colocate.write("counting.py", COUNTING)
    colocate.write("demo.yaml", CONFIG)
    with colocate.start("run", "demo.yaml", "--set", "groups.policy.on_failure=restart", stdin=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        lines: list[str] = []

        def step(number: int) -> None:
            running.stdin.write("\n")
            running.stdin.flush()
            for line in running.stdout:
                lines.append(line)
                if line.startswith(f"step {number}/"):
                    return

        for number in range(1, after + 1):
            step(number)
        os.kill(a_worker(running.pid).pid, signal.SIGKILL)
        out, errors = running.communicate("\n" * 20)
    assert running.returncode == 0, errors
    text = "".join(lines) + out
    assert "was killed by SIGKILL" in text
    assert ("going on from the start" if after == 1 else f"going on after step {after - 1}") in text
    lost = r"worker \d was killed at \d+ s: \d+ s lost"
    assert re.search(rf"^{lost}$", text, re.MULTILINE)
    assert re.search(r"^\(restart\) +\d", text, re.MULTILINE)
    report = (colocate.folder / "runs" / "demo" / "report.html").read_text()
    assert re.search(rf'<p class="restart">{lost}</p>', report)
    assert report.count('<i class="mark') == 2  # one mark on each lane
    assert [(row["step"], row["count"]) for row in rows(colocate.folder / "runs" / "demo")] == [
        (1, 1),
        (2, 3),
        (3, 6),
        (4, 10),
        (5, 15),
        (6, 21),
    ]
