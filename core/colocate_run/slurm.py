"""What Slurm says of the job in which a run is: its time limit, and how many tasks srun has made of one."""

from __future__ import annotations

import os
import time

from colocate.errors import ConfigError


def ends_at() -> float | None:
    """Return when Slurm will end this job, in seconds of `time.time()`; None where it hasn't said so."""
    try:
        return float(int(os.environ["SLURM_JOB_END_TIME"]))
    except (KeyError, ValueError):
        return None


def time_limit() -> str | None:
    """Return in words how long this job has after SIGTERM; None where nobody has said: Slurm, or a pod's manifest."""
    if (ends := ends_at()) is not None:
        left = ends - time.time()
        return f"Slurm's time limit is at {time.strftime('%H:%M:%S', time.localtime(ends))}, in {left:.0f} s"
    grace = os.environ.get("COLOCATE_GRACE_S", "")
    return f"it has {grace} s" if grace.isdecimal() else None


def refuse_many_tasks() -> None:
    """See that srun hasn't started the same run several times over.

    Not by SLURM_NTASKS, which a batch script has, too, though it is one process. `ray symmetric-run` is started as
    several tasks, and starts its command once.

    Raises:
        ConfigError: It has.
    """
    tasks, task = os.environ.get("SLURM_STEP_NUM_TASKS", ""), os.environ.get("SLURM_PROCID")
    if not tasks.isdigit() or int(tasks) < 2 or task is None:
        return
    import psutil

    try:
        if any("symmetric-run" in each.cmdline() for each in psutil.Process().parents()):
            return
    except psutil.Error:  # one has just ended, or is none of ours
        pass
    raise ConfigError(
        f"colocate run: srun has started it {tasks} times, this one as task {task}: each would be a whole run of its "
        "own. Start it once, it starts a worker for each slot: srun --ntasks=1 colocate run ...; for several nodes "
        "start a Ray or Dask in the job, as ray-nodes.sbatch and dask-nodes.sbatch do (see docs/operations.md)"
    )
