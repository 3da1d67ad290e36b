"""Requests to end a run, in each of its phases: any number of SIGTERMs, or one Ctrl-C."""

import os
import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import CommandLine

from colocate.testing.waiting import wait_until

DEMO = """
executor: {use: local, with: {processes: true}}
pools: {main: {slots: 1}}
groups: {policy: {pool: main, roles: {slow: "beside:Slow"}, on_failure: restart}}
job: beside:job
"""
BESIDE = """
    import os
    import time
    from pathlib import Path

    import colocate

    HELD = os.environ["HELD"]

    def comes_to(phase):
        Path(phase).touch()
        while HELD == phase and not Path("go").exists():
            time.sleep(0.01)

    class Slow:
        def __init__(self):
            comes_to("again" if Path("start").exists() else "start")

        @colocate.method
        def step(self):
            comes_to("call")

        @colocate.method
        def die(self):
            os._exit(1)

        def save(self, directory):
            comes_to("checkpoint")
            Path(directory, "slow").touch()

        def restore(self, directory):
            pass

        def close(self):
            comes_to("close")

    def job(run):
        comes_to("job")
        group = run.groups["policy"]
        first = (run.resumed is not None) + 1
        for step in range(first, first + 2):
            group["slow"].step()
            run.log(step, x=1)
            with run.checkpoint(step) as directory:
                group.checkpoint(directory / "policy", tag=step)
            if HELD == "again":
                group["slow"].die()
            if run.stopping:
                break
"""


class Held:
    """A job that waits in one phase until it may continue."""

    def __init__(self, colocate: CommandLine, phase: str, limit: str = "", **variables: str) -> None:
        colocate.write("beside.py", BESIDE)
        colocate.write("demo.yaml", DEMO)
        self.folder = colocate.folder
        self.process = colocate.start("run", "demo.yaml", HELD=phase, SLURM_JOB_END_TIME=limit, **variables)
        try:
            wait_until((self.folder / phase).exists, f"it comes to {phase}")
        except BaseException:
            self.process.kill()
            raise

    def send(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def notices(self) -> str:
        assert self.process.stderr is not None
        return next(line for line in self.process.stderr if "stopping after" in line).strip()

    def ended(self, *, go: bool = True) -> tuple[int, str, str]:
        if go:
            (self.folder / "go").touch()
        with self.process:
            out, err = self.process.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):  # no process of its session is left
            os.killpg(self.process.pid, 0)
        return self.process.returncode, out, err

    @property
    def saved(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("runs/demo/checkpoints/*"))


@pytest.fixture
def held(colocate: CommandLine) -> "Callable[..., Held]":
    return lambda phase, limit="", **variables: Held(colocate, phase, limit, **variables)


@pytest.mark.in_make_test("checkpoint")
@pytest.mark.parametrize("phase", ["job", "call", "checkpoint"])
def test_sigterm_asks_however_often(held: Callable[..., Held], phase: str) -> None:
    """Repeated SIGTERMs, as a scheduler sends them, end the run after one checkpoint."""
    run = held(phase)
    run.send(signal.SIGTERM)
    assert run.notices() == "SIGTERM: stopping after a checkpoint"
    run.send(*[signal.SIGTERM] * 4)
    code, out, err = run.ended()
    assert (code, err) == (128 + signal.SIGTERM, "")
    assert out.splitlines()[-1].startswith("stopped by SIGTERM, the first of ")
    assert out.splitlines()[-1].endswith("; saved up to step 1, go on with --resume")
    assert run.saved == ["step-000001"]
    log = (run.folder / "runs/demo/log.txt").read_text().splitlines()
    assert "SIGTERM: stopping after a checkpoint" in log
    assert log[-1] == out.splitlines()[-1]


def test_before_the_job(held: Callable[..., Held]) -> None:
    """SIGTERMs before the job begins end the run at once: there is nothing to save."""
    run = held("start")
    run.send(*[signal.SIGTERM] * 3)
    code, _, err = run.ended(go=False)
    assert (code, run.saved) == (128 + signal.SIGTERM, [])
    assert err.splitlines()[-1] == "SIGTERM before the job began: everything is closed, there is nothing to save"


def test_after_the_job(held: Callable[..., Held]) -> None:
    """SIGTERMs after the job has returned leave its exit status 0 and its checkpoints."""
    run = held("close")
    run.send(*[signal.SIGTERM] * 3)
    code, out, err = run.ended()
    assert (code, err) == (0, "")
    assert "everything is closed" in out
    assert run.saved == ["step-000001", "step-000002"]


@pytest.mark.long
@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 4), (signal.SIGINT, 1)])
def test_while_a_group_is_restarted(held: Callable[..., Held], number: signal.Signals, times: int) -> None:
    """A signal during a group's restart ends the run with its checkpoint kept, without waiting for the group."""
    run = held("again")
    run.send(*[number] * times)  # one kind: the kernel chooses the order of two that arrive at once
    code, out, err = run.ended(go=False)
    assert code == 128 + number, err
    assert out.splitlines()[-1].endswith("; saved up to step 1, go on with --resume")
    assert run.saved == ["step-000001"]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["call", pytest.param("checkpoint", marks=pytest.mark.long)])
def test_single_ctrl_c_with_sigterm_keeps_checkpoint(
    held: Callable[..., Held], phase: str, first: signal.Signals
) -> None:
    run = held(phase)
    run.send(first)
    assert run.notices().startswith(f"{first.name}: stopping after a checkpoint")
    run.send(signal.SIGINT if first == signal.SIGTERM else signal.SIGTERM, signal.SIGTERM)
    code, _, _ = run.ended()
    assert (code, run.saved) == (128 + first, ["step-000001"])


@pytest.mark.parametrize("phase", ["call", pytest.param("checkpoint", marks=pytest.mark.long)])
def test_second_ctrl_c_ends_run_at_once(held: Callable[..., Held], phase: str) -> None:
    """Two Ctrl-C after a SIGTERM end the run at once, without a checkpoint."""
    run = held(phase)
    run.send(signal.SIGTERM)
    run.notices()
    assert run.process.stderr is not None
    while not select.select([run.process.stderr], [], [], 1.0)[0]:  # equal signals that arrive at once are merged
        run.send(signal.SIGINT)
    code, _, err = run.ended(go=False)
    assert (code, run.saved) == (128 + signal.SIGINT, [])
    assert "interrupted: everything is closed" in err


def test_slurm_time_limit_is_reported(held: Callable[..., Held]) -> None:
    run = held("job", str(int(time.time()) + 3600))
    run.send(signal.SIGTERM)
    told = run.notices()
    assert told.startswith("SIGTERM: stopping after a checkpoint; Slurm's time limit is at "), told
    left = int(told.removesuffix(" s").rpartition(" ")[2])
    assert 3500 < left <= 3600
    assert run.ended()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("state", "left", "said"),
    [
        ("COMPLETING", None, "Slurm kills this job at "),
        ("RUNNING", 60, "Slurm ends this job at "),
        ("RUNNING", 3600, "Slurm's time limit is at "),
        ("", 3600, "Slurm's time limit is at "),
    ],
    ids=["preempted", "preempted with grace", "time limit", "no answer"],
)
def test_slurm_says_when_a_job_ends(
    held: Callable[..., Held], colocate: CommandLine, tmp_path: Path, state: str, left: int | None, said: str
) -> None:
    """The stop message says when Slurm ends the job: by SIGKILL after a preemption, or at its time limit."""
    ends = int(time.time()) + (left or 3600)
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(ends))
    answers = {"squeue": f"{state} {at}" if state else "", "scontrol": "KillWait                = 30 sec"}
    (tmp_path / "bin").mkdir()
    for program, answer in answers.items():
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / "bin" / program).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run = held("job", str(ends if left != 60 else ends + 600), SLURM_JOB_ID="7", PATH=path)
    run.send(signal.SIGTERM)
    assert run.notices() == "SIGTERM: stopping after a checkpoint"
    assert run.process.stderr is not None
    line = next(line for line in run.process.stderr if said in line).strip()
    (seconds,) = re.findall(r", in (\d+) s", line)
    expected = left or 30
    assert expected - 20 < int(seconds) <= expected
    assert line.endswith(" (KillWait)") == (state == "COMPLETING")
    code, _, err = run.ended()
    assert code == 128 + signal.SIGTERM
    assert ("time limit" in line + err) == (said == "Slurm's time limit is at ")


def test_many_tasks_of_srun(colocate: CommandLine) -> None:
    """Several tasks of one `srun` are refused: each would be a whole run."""
    colocate.write("demo.yaml", "job: beside:job\n")
    colocate.write("beside.py", "def job(run):\n    print('ran')\n")
    batch = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}  # a batch script, which is one process, has these
    done = colocate("run", "demo.yaml", **batch)
    assert (done.returncode, "ran\n" in done.stdout) == (0, True)
    done = colocate("run", "demo.yaml", SLURM_STEP_NUM_TASKS="2", **batch)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: colocate run: srun has started it 2 times, this one as task 0: ")
    assert "srun --ntasks=1 colocate run ..." in done.stderr
