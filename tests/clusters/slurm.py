"""Slurm on machines: the controller on n0, a node on each other machine.

The packages are Debian's: apt-get install slurm-wlm slurm-wlm-basic-plugins munge.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
from tests.clusters.machines import Machines

from colocate.testing.waiting import wait_until

_CONF = """
ClusterName=tests
SlurmctldHost=n0
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation={state}/slurm
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
GresTypes=gpu
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MinJobAge=3000
ReturnToService=2
SlurmdTimeout={node_timeout}
MpiDefault=none
NodeName=n[1-{nodes}] CPUs=8 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=60 PriorityTier=5 DefMemPerCPU=100 OverTimeLimit=0
PartitionName=low Nodes=n[1-{nodes}] MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} DefMemPerCPU=100
PartitionName=high Nodes=n[1-{nodes}] MaxTime=60 PriorityTier=10 PreemptMode=OFF DefMemPerCPU=100
"""


def lacks() -> str | None:
    """Return the reason why Slurm can't run here, or None."""
    for program in "slurmctld", "slurmd", "munged":
        if shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin") is None:
            return f"there is no {program}: apt-get install slurm-wlm slurm-wlm-basic-plugins munge"
    return None if Path("/etc/slurm").is_dir() else "there is no /etc/slurm, where its configuration would be"


@attrs.define(eq=False)
class Slurm:
    """A running Slurm.

    Attributes:
        machines: The controller n0, and the nodes.
        folder: The folder in which jobs are submitted and write, seen by all nodes.
    """

    machines: Machines
    folder: Path

    def __call__(self, *command: str, check: bool = True) -> str:
        """Run a command of Slurm's, and return its output."""
        done = self.machines[0].run(*command, cwd=self.folder, check=check)
        return str(done.stdout).strip()

    def submit(self, *words: str) -> int:
        """Submit a batch job: sbatch's options, the script, its arguments."""
        return int(self("sbatch", "--parsable", *words))

    def state(self, job: int) -> str:
        """Return a job's state, as RUNNING."""
        return self("squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T")

    def node(self, job: int) -> str:
        """Return the node on which a job's batch script runs."""
        (found,) = re.findall(r"BatchHost=(\S+)", self("scontrol", "show", "job", str(job)))
        return str(found)

    def printed(self, job: int) -> str:
        """Return a job's output so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"slurm-{job}.out").read_text(errors="replace")
        return ""

    def wait_for(self, job: int, *states: str, within: float = 120.0) -> str:
        """Wait until a job is in one of these states."""
        until = time.monotonic() + within
        while (state := self.state(job)) not in states:
            assert time.monotonic() < until, f"job {job} is {state}, not {states}\n{self.printed(job)}"
            time.sleep(0.2)
        return state

    def wait_for_line(self, job: int, pattern: str, count: int = 1, within: float = 120.0) -> str:
        """Wait until a job has printed `count` matching lines; return the match in the last one."""
        until = time.monotonic() + within
        while len(found := re.findall(pattern, self.printed(job), re.MULTILINE)) < count:
            assert time.monotonic() < until, f"job {job}, {self.state(job)}: no {pattern!r}\n{self.printed(job)}"
            time.sleep(0.1)
        return str(found[count - 1])


@contextlib.contextmanager
def slurm_on(nodes: int, *, grace: int = 0, kill_wait: int = 30, node_timeout: int = 10) -> Iterator[Slurm]:
    """Start Slurm with the partitions main, low and high; high preempts low.

    Args:
        nodes: The number of nodes, with eight CPUs and two fake GPUs each.
        grace: Seconds that a preempted job has before Slurm ends the job.
        kill_wait: Seconds from SIGTERM to SIGKILL.
        node_timeout: Seconds until a node that doesn't answer is down.
    """
    machines = Machines(nodes + 1)
    state, etc = machines.state, machines.state / "etc-slurm"
    for folder in etc, state / "slurm":
        folder.mkdir()
    values = {"state": state, "nodes": nodes, "grace": grace, "kill_wait": kill_wait, "node_timeout": node_timeout}
    (etc / "slurm.conf").write_text(_CONF.format(**values))
    for gpu in "gpu0", "gpu1":
        os.mknod(state / gpu, 0o666 | 0o20000, os.makedev(1, 3))  # /dev/null by another name
    (etc / "gres.conf").write_text(f"NodeName=n[1-{nodes}] Name=gpu File={state}/gpu[0-1] Flags=nvidia_gpu_env\n")
    (etc / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n")
    (state / "munge.key").write_bytes(os.urandom(1024))
    with machines:
        found = Slurm(machines, machines.shared)
        for each in range(len(machines)):
            start_daemons(found, each)
        wait_until(lambda: idle(found) == nodes, f"Slurm has {nodes} nodes")
        yield found


def start_daemons(slurm: Slurm, number: int) -> None:
    """Start Slurm's daemons on a machine, also again after a reboot."""
    machine, state = slurm.machines[number], slurm.machines.state
    own = ["key-file=/run/munge.key", "pid-file=/run/munge/munged.pid", "log-file=/run/munge/log"]
    own += ["seed-file=/run/munge/seed", "socket=/run/munge/munge.socket.2"]
    machine.run("install", "-m", "400", f"{state}/munge.key", "/run/munge.key")
    machine.run("munged", "--force", *(f"--{each}" for each in own))
    if number == 0:
        machine.run("slurmctld")
    else:
        machine.run("mkdir", "-p", "/tmp/slurmd")
        machine.run("slurmd", "-N", machine.name)


def idle(slurm: Slurm) -> int:
    """Return the number of idle nodes."""
    return slurm("sinfo", "-h", "-N", "-o", "%T", "-p", "main", check=False).splitlines().count("idle")
