"""Ask Slurm about the batch job of a run: the end time, and the number of tasks that srun has started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from datetime import datetime

from colocate.errors import ConfigError

_ANSWERS_WITHIN_S = 10.0


def find_end() -> float | None:
    """Return this job's end time from the environment, in seconds of `time.time()`; None if there is none."""
    try:
        return float(int(os.environ["SLURM_JOB_END_TIME"]))
    except (KeyError, ValueError):
        return None


def describe_time_limit() -> str | None:
    """Describe how long the job may run after SIGTERM, by environment variables; return None without a limit."""
    if (ends := find_end()) is not None:
        return _describe_end("Slurm's time limit is", ends)
    grace = os.environ.get("COLOCATE_GRACE_S", "")
    return f"it has {grace} s" if grace.isdecimal() else None


def has_job() -> bool:
    """Return whether this process belongs to a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


def ask_end(signalled: float) -> tuple[float | None, str | None]:
    """Ask Slurm when this job will end after SIGTERM; return the time, and a sentence about the time.

    A job that Slurm is ending (preempted, cancelled, requeued) has `KillWait` seconds from SIGTERM to SIGKILL. A
    running job has until the end time, which a preemption with `GraceTime` sets earlier. Without an answer the time
    limit of the environment counts.

    Args:
        signalled: When SIGTERM came, in seconds of `time.time()`.
    """
    try:
        state, end = _ask_slurm(
            "squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%T %e"
        ).split()
        if state == "RUNNING":
            ends = datetime.fromisoformat(end).timestamp()
            return ends, _describe_end("Slurm's time limit is" if ends == find_end() else "Slurm ends this job", ends)
        (wait,) = re.findall(r"^KillWait\s*=\s*(\d+)", _ask_slurm("scontrol", "show", "config"), re.MULTILINE)
    except (OSError, subprocess.SubprocessError, ValueError):  # The command is missing or fails.
        return find_end(), describe_time_limit()
    return signalled + int(wait), _describe_end("Slurm kills this job", signalled + int(wait)) + " (KillWait)"


def _ask_slurm(*command: str) -> str:
    # Slurm sends SIGTERM to all processes of a job. The command inherits this mask, and so ignores the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWERS_WITHIN_S, check=True).stdout
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _describe_end(what: str, at: float) -> str:
    return f"{what} at {time.strftime('%H:%M:%S', time.localtime(at))}, in {max(0.0, at - time.time()):.0f} s"


def refuse_many_tasks() -> None:
    """Refuse a run that srun has started several times.

    SLURM_NTASKS doesn't show this, because a batch script has it, too, as one process. `ray symmetric-run` starts as
    several tasks, and starts the command once.

    Raises:
        ConfigError: There are several tasks.
    """
    tasks, task = os.environ.get("SLURM_STEP_NUM_TASKS", ""), os.environ.get("SLURM_PROCID")
    if not tasks.isdigit() or int(tasks) < 2 or task is None:
        return
    import psutil

    try:
        if any("symmetric-run" in parent.cmdline() for parent in psutil.Process().parents()):
            return
    except psutil.Error:  # A parent process has just ended, or belongs to another user.
        pass
    raise ConfigError(
        f"colocate run: srun has started it {tasks} times, this one as task {task}: each would be a whole run of its "
        "own. Start it once, it starts a worker for each slot: srun --ntasks=1 colocate run ...; for several nodes "
        "start a Ray or Dask in the job, as ray-nodes.sbatch and dask-nodes.sbatch do (see docs/operations.md)"
    )
