"""A job with the batch scripts of the page Operations saves and resumes, in whichever way Slurm ends the job."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
from collections.abc import Iterator

import pytest
from tests.clusters.machines import ROOT
from tests.clusters.slurm import Slurm, idle, lacks, slurm_on, start_daemons

from colocate.testing.waiting import wait_until

SCRIPTS = ROOT / "docs" / "examples" / "operations"
NODES = 3
TIMES = int(os.environ.get("COLOCATE_TIMES", "1"))
KINDS = {"one node": "train.sbatch", "ray": "ray-nodes.sbatch", "dask": "dask-nodes.sbatch"}
# The event, and the grace of preempted jobs in seconds.
WAYS = {
    "preempted": 0,
    "preempted with grace": 60,
    "time limit": 0,
    "scancel --signal": 0,
    "scancel --full": 0,
    "scancel": 0,
    "requeue": 0,
    "node killed": 0,
    "node lost": 0,
}
KILL_WAIT_S = 30
RESTARTS = """
executor: local
pools: {{main: {{strategy: strict_spread, {pool}}}}}
groups: {{policy: {{pool: main, on_failure: restart, roles: {{counter: "ticks:Counter"}}}}}}
job: "ticks:train"
"""
POOLS = {"a spare": "slots: 2, spares: 1", "fewer slots": "slots: 3, at_least: 2, regrow_timeout: 1"}


@pytest.fixture
def slurm(namespaces: None, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """Start a Slurm; the test's parameter is the grace of preempted jobs."""
    missing = lacks()
    if missing is not None:
        pytest.skip(missing)
    with slurm_on(NODES, grace=request.param, kill_wait=KILL_WAIT_S) as found:
        for path in (ROOT / "tests" / "clusters" / "jobs").glob("*.*"):
            shutil.copy(path, found.folder)
        yield found


def submit(slurm: Slurm, kind: str, *more: str) -> int:
    own = ["--gpus-per-node=1", "--cpus-per-task=4", "--time=30", "--partition=low", *more]
    own += [] if kind == "one node" else [f"--nodes={NODES}"]
    return slurm.submit(*own, str(SCRIPTS / KINDS[kind]), "ticks.yaml")


def saved(slurm: Slurm) -> int:
    """Return the step of the last checkpoint, or 0 without one."""
    found = (slurm.folder / "runs").glob("ticks*/checkpoints/step-*")
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("time_", range(TIMES))
@pytest.mark.parametrize(("way", "slurm"), WAYS.items(), indirect=["slurm"], ids=WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_job_saves_and_resumes(slurm: Slurm, kind: str, way: str, time_: int) -> None:
    saves = way not in ("node killed", "node lost")
    job = submit(slurm, kind, *(["--signal=TERM@75"] if way == "time limit" else []))
    slurm.wait_for_line(job, r"^step 25 ", within=300)
    began, node = time.monotonic(), int(slurm.node(job).removeprefix("n"))
    if way.startswith("preempted"):
        (slurm.folder / "urgent.sh").write_text("#!/bin/bash\nsleep 5\n")
        slurm.submit("--partition=high", f"--nodes={NODES}", "--exclusive", "urgent.sh")
    elif not saves:
        slurm.machines[node].kill()
    elif way == "requeue":
        slurm("scontrol", "requeue", str(job))
    elif way == "time limit":  # counted from now, however long the start took
        slurm("scontrol", "update", f"JobId={job}", "EndTime=now+180")
    else:
        words = {"scancel --signal": ["--signal=TERM"], "scancel --full": ["--full", "--signal=TERM"], "scancel": []}
        slurm("scancel", *words[way], str(job))
    if saves:
        step = int(slurm.wait_for_line(job, r"^stopped by SIGTERM.*; saved up to step (\d+), ", within=150))
        print(f"{kind}, {way}: saved step {step} after {time.monotonic() - began:.1f} s")
        assert step == saved(slurm)
        last = re.findall(r"^step (\d+) ", slurm.printed(job), re.MULTILINE)[-1]
        assert step == int(last)  # no step is lost
        kills = re.search(r"Slurm kills this job at .*, in [23]\d s \(KillWait\)", slurm.printed(job))
        assert bool(kills) == (way in ("preempted", "requeue", "scancel"))
        assert ("Slurm's time limit is at" in slurm.printed(job)) == way.startswith("scancel --")
    if way == "scancel":
        slurm.wait_for(job, "CANCELLED", within=KILL_WAIT_S + 30)
        wait_until(lambda: idle(slurm) == NODES, "its nodes are free")
        assert slurm.printed(job).count("ticks: running in runs/ticks") == 1
        return
    if way == "node lost":
        slurm.wait_for(job, "PENDING", within=200)
    if not saves and kind != "one node":
        slurm.machines[node].boot()
        start_daemons(slurm, node)
    resumed = int(slurm.wait_for_line(job, r"going on after step (\d+)$", within=300))
    print(f"{kind}, {way}: went on after {time.monotonic() - began:.1f} s")
    assert resumed == step if saves else resumed >= 20
    counts = rf"(?s)going on after step {resumed}$.*?^step {resumed + 5} "
    slurm.wait_for_line(job, counts, within=120)  # from the restored counts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("slurm", [0], indirect=True, ids=["low"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", ["ray", "dask"])
def test_a_node_dies(slurm: Slurm, kind: str, pool: str) -> None:
    """A run whose groups restart continues after a node's death, in the same job, though Slurm has the node down."""
    (slurm.folder / "ticks.yaml").write_text(RESTARTS.format(pool=POOLS[pool]))
    job = submit(slurm, kind)
    slurm.wait_for_line(job, r"^step 25 ", within=300)
    head = slurm.node(job)
    logs = [path.read_text() for path in slurm.folder.glob("runs/ticks/logs/policy-*.txt")]
    used = {node for text in logs for node in re.findall(r"^\S+ \S+ -- .* on node (\S+)$", text, re.MULTILINE)}
    # Dask calls a node by its address.
    lost = next(each for each in slurm.machines if {each.name, each.address} & used and each.name != head)
    lost.kill()
    restarted = int(slurm.wait_for_line(job, r"going on after step (\d+)$", within=120))
    wait_until(
        lambda: slurm("sinfo", "-h", "-N", "-n", lost.name, "-p", "main", "-o", "%T").startswith("down"), "Slurm knows"
    )
    last = int(re.findall(r"^step (\d+) ", slurm.printed(job), re.MULTILINE)[-1])
    slurm.wait_for_line(job, rf"^step {last + 50} ", within=60)  # ten seconds
    assert restarted >= 20
    assert slurm.state(job) == "RUNNING"
    assert slurm.printed(job).count("ticks: started in") == 1  # nor was the job requeued


@pytest.mark.timeout(600)
@pytest.mark.parametrize("slurm", [0], indirect=True, ids=["low"])
def test_dask_jobqueue(slurm: Slurm) -> None:
    """A pool waits for the Dask workers that dask-jobqueue submits as jobs; a cancelled one is replaced."""
    if importlib.util.find_spec("dask_jobqueue") is None:  # an import would set a signal handler
        pytest.skip("dask-jobqueue isn't installed: pip install dask-jobqueue")
    done = slurm.machines[0].run("python", "jobqueue.py", cwd=slurm.folder, timeout=400, check=False)
    assert done.stdout.split()[-2:] == ["restarted", "replaced"], f"{done.stdout}\n{done.stderr}"
