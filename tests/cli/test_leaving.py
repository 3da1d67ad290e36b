"""`run.leaving`: a run notices the end of its batch job, and writes a checkpoint in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine

from colocate import Leaving
from colocate_run import leaving
from colocate_run.leaving import Notices

CONFIG = """
    groups: {}
    observe: [{use: "watching:Watching"}]
    job: {use: "watching:job"}
"""
WATCHING = """
    import time
    from pathlib import Path

    class Watching:
        def colocate_run_leaving(self, leaving):
            Path("told").write_text(f"{leaving.who} {leaving.until:.0f}")

    def job(run):
        step = 0
        while not Path("told").exists():
            step += 1
            if run.is_due(step, 0):
                print("due", step)
                with run.checkpoint(step):
                    pass
            time.sleep(0.01)
        for step in (step + 1, step + 2):
            if run.is_due(step):
                with run.checkpoint(step):
                    pass
            print("after", run.leaving.who, run.is_due(step))
"""


class Cluster:
    """A stand-in for a driver, which reports when nodes leave."""

    foresees = True

    def __init__(self) -> None:
        self.nodes: dict[str, float | None] = {}

    def leaving(self) -> dict[str, float | None]:
        return self.nodes


def test_the_end_of_a_batch_job(colocate: CommandLine) -> None:
    """The end of a batch job makes one checkpoint due; `run.leaving` still names the batch job afterwards."""
    colocate.write("watching.py", WATCHING)
    colocate.write("demo.yaml", CONFIG)
    ends = int(time.time() + leaving.NOTICE_S - 1)
    done = colocate("run", "demo.yaml", SLURM_JOB_END_TIME=str(ends))
    assert done.returncode == 0, done.stderr
    assert (colocate.folder / "told").read_text() == f"the batch job {ends}"
    assert done.stdout.count("after the batch job False\n") == 2
    assert len(list((colocate.folder / "runs" / "demo" / "checkpoints").iterdir())) == 1
    assert "the batch job will end at " in (colocate.folder / "runs" / "demo" / "log.txt").read_text()


def test_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice is reported once, the soonest first; a withdrawn notice is reported again when it returns."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    told: list[Leaving] = []
    cluster, now = Cluster(), time.time()
    notices = Notices(cluster, told.append)  # type: ignore[arg-type]
    notices._update_departures({"n3": now + 2 * leaving.NOTICE_S})
    assert not notices.departures
    assert notices.last_number == 0
    n1, n2 = Leaving("node n1", now + 60), Leaving("node n2", None)
    notices._update_departures({"n1": n1.until, "n2": None})
    assert notices.departures == (n2, n1)
    assert notices.last_number == 2
    n0 = Leaving("node n0", now + 30)
    notices._update_departures({"n0": n0.until, "n1": n1.until, "n2": None})
    assert notices.last_number == 3  # no earlier checkpoint answers this notice
    notices._update_departures({"n1": n1.until})
    assert notices.last_number == 3
    notices._update_departures({"n1": n1.until, "n2": None})
    assert notices.last_number == 4
    assert told == [n2, n1, n0, n2]
    assert str(n2) == "node n2 will end soon"


def test_executor_without_notices_starts_no_thread(tmp_path: Path) -> None:
    """On an executor without notices, a run starts no thread for them."""
    import threading

    import colocate as package

    with package.connect() as runtime, package.record(runtime, tmp_path / "run") as run:
        assert run.leaving is None
        assert not run.is_due(1)
        assert "colocate-notices" not in {thread.name for thread in threading.enumerate()}
