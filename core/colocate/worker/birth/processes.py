"""Finds worker processes in the operating system's process list, by their command lines."""

from __future__ import annotations

import os

import attrs
import psutil

from colocate.executor import Running
from colocate.worker.birth.supervisor import MARK, SUPERVISORS, find_starter

MODULE = "colocate.worker"
OF_A_ROLE = "process of a role"


@attrs.frozen
class WorkerProcessInfo:
    """A process that runs `colocate.worker`: a worker, a supervisor or a template."""

    pid: int  # process id
    starter: int  # Pid of the process that started this one.
    # Whether the starter has exited.
    # A worker's forked child has the worker's command line, but isn't an orphan while the starter runs.
    orphan: bool
    label: str  # Id of the worker, or of the reservation for which a keeper started the worker.
    since: float  # Start time, as a value of time.time().


@attrs.frozen
class Leftover:
    """A leftover process that a worker's role has started, and that has outlived the worker and both supervisors."""

    pid: int  # process id
    since: float  # Start time, as a value of time.time().
    label: str  # Label of the worker; empty if the process has cleared the environment.
    starter: int  # Pid of the process that started the worker.
    name: str  # Name of the process's program.

    def to_running(self, node: str = "") -> Running:
        """Return this process as an entry for an audit."""
        worker = f"worker {self.label}" if self.label else f"a worker of a runtime of process {self.starter}"
        detail = f"{worker}, whose role started it, and what should have ended it with that are gone"
        return Running(OF_A_ROLE, self.name, node=node, pid=self.pid, since=self.since, detail=detail)


@attrs.frozen
class Child:
    """A child process of the current process."""

    supervisor_pid: int  # Process id; for a worker, the upper supervisor's id.
    pid: int  # Process id; for a worker, the id of the worker itself.
    since: float  # Start time, as a value of time.time().
    label: str  # Label of the worker; empty for other processes, or if the command line was changed.


def list_children() -> list[Child]:
    """Return the running children of this process, without zombies.

    For a worker, the entry names the worker itself, not a supervisor.
    """
    this = psutil.Process()
    below: dict[int, list[psutil.Process]] = {}
    for process in this.children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                below.setdefault(process.ppid(), []).append(process)
        except psutil.Error:  # The process has exited.
            continue
    children = []
    for process in below.get(this.pid, []):
        try:
            arguments, shown = get_arguments(process, MODULE), process
            # A supervisor's first child is the supervised process.
            # Without a child, the supervisor is just starting or ending.
            for _ in range(0 if arguments is None else SUPERVISORS):
                shown = min(below.get(shown.pid, [shown]), key=lambda child: (child.create_time(), child.pid))
            label = "".join((arguments or [])[3:4]).strip()  # A template has no label.
            children.append(Child(process.pid, shown.pid, shown.create_time(), label))
        except psutil.Error:  # The process has exited.
            continue
    return children


def find_worker(started: int) -> int | None:
    """Return the pid of a worker's own process, or of a supervisor without a child; None if the worker has ended.

    Args:
        started: The worker's upper supervisor, a child of this very process. Children of other processes aren't seen.
    """
    try:
        if psutil.Process(started).ppid() != os.getpid():  # The supervisor has ended, and the pid was reused.
            return None
        for _ in range(SUPERVISORS):
            with open(f"/proc/{started}/task/{started}/children") as file:
                started = next(map(int, file.read().split()), started)  # The oldest child comes first.
    except (psutil.Error, OSError):
        return None
    return started


def has_worker_ended(started: int) -> bool:
    """Return whether a worker has ended. Its upper supervisor (process `started`) may still be ending descendants."""
    worker = find_worker(started)
    try:
        return worker is None or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:  # The process has just ended.
        return True


def list_leftovers(starter: int | None = None) -> list[Leftover]:
    """Return processes that workers have left behind: with a worker's mark, but not below the worker's starter.

    Args:
        starter: Only leftovers of this process's workers, forks of a worker included; None for the whole machine,
            without forks of workers (see `list_workers`).
    """
    leftovers = []
    for process in psutil.process_iter():
        try:
            mark, _, label = process.environ().get(MARK, "").partition(" ")
            above = int(mark) if mark.isdigit() else find_starter(process.rlimit(psutil.RLIMIT_RTTIME)[0])
            if above is None or (starter is not None and above != starter):
                continue
            if starter is None and get_arguments(process, MODULE) is not None:
                continue
            if process.status() != psutil.STATUS_ZOMBIE and above not in {parent.pid for parent in process.parents()}:
                name = label if mark.isdigit() else ""
                leftovers.append(Leftover(process.pid, process.create_time(), name, above, process.name()))
        except (psutil.Error, OSError):  # The process has exited, or belongs to another user.
            continue
    return leftovers


def list_workers() -> list[WorkerProcessInfo]:
    """Return all worker processes of this machine that this operating-system user can see."""
    workers = []
    for process in psutil.process_iter():
        try:
            arguments = get_arguments(process, MODULE)
            if arguments is None or len(arguments) < 2 or not arguments[1].isdigit():
                continue
            starter = int(arguments[1])
            orphan = starter not in {parent.pid for parent in process.parents()}
            label = "".join(arguments[3:4]).strip()
            workers.append(WorkerProcessInfo(process.pid, starter, orphan, label, process.create_time()))
        except (psutil.Error, OSError):  # The process has exited, or belongs to another user.
            continue
    return workers


def get_arguments(process: psutil.Process, module: str) -> list[str] | None:
    """Return the arguments of a process that runs a module; None for another program.

    Raises:
        psutil.Error: The process can't be inspected.
    """
    words = process.cmdline()
    for index, word in enumerate(words):
        if word == module and index and words[index - 1] == "-m":
            return words[index + 1 :]
    return None
