"""Run checkpoints that groups write in the background: each is complete or absent, and waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.suite.probes.halves import HalfSaver

import colocate
from colocate import ColocatedGroup, Runtime
from colocate.config import load_config
from colocate.driver import checkpoints_of
from colocate.errors import ForkedError, RoleError
from colocate.testing.gate import Gate
from colocate.testing.waiting import PATIENCE_S, wait_until


class CheckpointObserver:
    """An observer that records checkpoints."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, Path]] = []
        self.groups: list[colocate.CheckpointRecord] = []

    def colocate_run_checkpointed(self, step: int, directory: Path) -> None:
        assert (directory / "policy" / "checkpoint.json").exists()
        self.runs.append((step, directory))

    def colocate_group_checkpointed(self, record: colocate.CheckpointRecord) -> None:
        self.groups.append(record)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with colocate.connect("local") as runtime:
        yield runtime


@pytest.fixture
def group(runtime: Runtime) -> ColocatedGroup:
    return runtime.reserve(2).spawn({"halved": colocate.role(HalfSaver)}, name="policy")


def write(run: colocate.Run, group: ColocatedGroup, step: int) -> None:
    with run.checkpoint(step) as directory:
        group.checkpoint(directory / "policy", tag=step, wait=False)
        (directory / "step").write_text(str(step))


def steps(run: colocate.Run) -> list[str]:
    """Return the names in a run's checkpoint folder, hidden ones too."""
    folder = run.directory / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_job_goes_on_while_groups_write(runtime: Runtime, group: ColocatedGroup, tmp_path: Path) -> None:
    """Calls run while groups write a checkpoint; the next checkpoint waits, and observers are notified of each."""
    role, told = group.role("halved", HalfSaver), CheckpointObserver()
    with colocate.record(runtime, tmp_path / "run", observe=[told]) as run, ThreadPoolExecutor(1) as pool:
        with Gate() as gate:
            role.become(gate=gate.address)
            write(run, group, 1)
            gate.wait_for(2)
            assert role.add() == [1, 1]
            assert [name for name in steps(run) if not name.startswith(".part-")] == []
            role.become()
            following = pool.submit(write, run, group, 2)
            with pytest.raises(TimeoutError):
                following.result(0.2)
            gate.open()
            following.result(PATIENCE_S)
        write(run, group, 3)
    assert steps(run) == ["step-000002", "step-000003"]
    assert (run.directory / "checkpoints" / "step-000003" / "step").read_text() == "3"
    assert told.runs == [(step, run.directory / "checkpoints" / f"step-00000{step}") for step in (1, 2, 3)]
    assert [(record.group, record.tag, record.nbytes > 0) for record in told.groups] == [
        ("policy", step, True) for step in (1, 2, 3)
    ]
    assert all(record.start < record.taken < record.end for record in told.groups)
    last = checkpoints_of(group).checkpoint
    assert last is not None
    assert last.folder == run.directory / "checkpoints" / "step-000003" / "policy"
    group.restore(last.folder)


def test_failed_background_write_is_raised(runtime: Runtime, group: ColocatedGroup, tmp_path: Path) -> None:
    """A failed background write is raised by the next checkpoint or the run's end; the previous checkpoint stays."""
    role = group.role("halved", HalfSaver)

    def job() -> None:
        with colocate.record(runtime, tmp_path / "run") as run:
            write(run, group, 1)
            role.become("fails")
            write(run, group, 2)
            with pytest.raises(RoleError, match="the disk is full"):
                write(run, group, 3)
            assert steps(run) == ["step-000001"]
            write(run, group, 3)

    with pytest.raises(RoleError, match="the disk is full"):
        job()
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000001"]
    last = checkpoints_of(group).checkpoint
    assert last is not None
    assert last.folder == folder / "step-000001" / "policy"
    role.become()
    group.checkpoint(tmp_path / "another")


def test_a_notice_is_answered_by_a_checkpoint_that_counts(
    runtime: Runtime, group: ColocatedGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a written checkpoint answers a notice: during the write none is due, after a failure one is."""
    role = group.role("halved", HalfSaver)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 300)))
    with colocate.record(runtime, tmp_path / "run") as run:
        wait_until(lambda: run.leaving is not None, "it is noticed")
        assert run.is_due(1)
        with Gate() as gate:
            role.become("fails", gate.address)
            write(run, group, 1)
            gate.wait_for(2)
            assert not run.is_due(1)
            gate.open()
            wait_until(lambda: run.is_due(1), "it is due again")
        role.become()
        with pytest.raises(RoleError, match="the disk is full"):
            write(run, group, 2)
        assert run.is_due(2)
        write(run, group, 2)
        assert not run.is_due(2)
        run._checkpoints.wait_pending()
        assert not run.is_due(2)
        assert steps(run) == ["step-000002"]


def test_a_block_that_fails_leaves_nothing(runtime: Runtime, group: ColocatedGroup, tmp_path: Path) -> None:
    """A checkpoint block that raises leaves no checkpoint, and its group can write another one."""
    with colocate.record(runtime, tmp_path / "run") as run:

        def fail() -> None:
            with run.checkpoint(1) as directory:
                group.checkpoint(directory / "policy", wait=False)
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            fail()
        assert steps(run) == []
        group.checkpoint(tmp_path / "another")


def test_failed_run_finishes_pending_checkpoint(runtime: Runtime, group: ColocatedGroup, tmp_path: Path) -> None:
    """A run that fails still waits for the checkpoint that its groups are writing."""

    def job() -> None:
        with colocate.record(runtime, tmp_path / "run") as run:
            write(run, group, 1)
            raise ValueError("a bad step")

    with pytest.raises(ValueError, match="a bad step"):
        job()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_fork_while_groups_write(runtime: Runtime, group: ColocatedGroup, tmp_path: Path) -> None:
    """In a forked child, a pending checkpoint raises ForkedError, and the end of the block doesn't wait for it."""
    child, told, ends = -1, 1, (0, 0)

    def ended() -> bool:
        nonlocal ends
        ends = os.waitpid(child, os.WNOHANG)
        return ends[0] == child

    with Gate() as gate:
        try:
            with colocate.record(runtime, tmp_path / "run") as run:
                group.role("halved", HalfSaver).become(gate=gate.address)
                write(run, group, 1)
                saving = checkpoints_of(group).saving
                assert saving is not None
                gate.wait_for(2)
                if child := os.fork():
                    try:
                        wait_until(ended, "the child has ended")
                    except BaseException:
                        os.kill(child, signal.SIGKILL)
                        raise
                    finally:
                        gate.open()
                else:
                    with contextlib.suppress(ForkedError):
                        saving.result(PATIENCE_S)
                        told = 2
                    told -= 1
        finally:
            if not child:
                os._exit(told)
    assert ends[1] == 0
    assert steps(run) == ["step-000001"]


def job(run: colocate.Run, *, gate: Gate) -> None:
    """Send SIGTERM to this process while the group writes."""
    group = run.groups["policy"]
    group.role("halved", HalfSaver).become(gate=gate.address)
    write(run, group, 1)
    gate.wait_for(2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.stopping
    threading.Timer(0.2, gate.open).start()


def test_a_job_that_is_asked_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that gets SIGTERM while its group writes ends with that checkpoint complete."""
    monkeypatch.chdir(tmp_path)
    config = {
        "name": "asked",
        "pools": {"main": {"slots": 2}},
        "groups": {"policy": {"pool": "main", "roles": {"halved": f"{HalfSaver.__module__}:HalfSaver"}}},
    }
    with Gate() as gate, colocate.launch(load_config(config | {"job": f"{__name__}:ends"})) as launched:
        GATES.append(gate)
        record = launched.run(quiet=True)
    assert record.stopped == "SIGTERM"
    assert [path.name for path in (record.directory / "checkpoints").iterdir()] == ["step-000001"]


GATES: list[Gate] = []


def ends(run: colocate.Run) -> None:
    """Run the job with a gate, which a config can't contain."""
    job(run, gate=GATES.pop())
