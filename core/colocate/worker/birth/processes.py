"""Worker processes as the operating system shows them; the owner is on the command line."""

from __future__ import annotations

import os

import attrs
import psutil

from colocate.executor import Running
from colocate.worker.birth.supervisor import MARK, SUPERVISORS, starter_of

MODULE = "colocate.worker"
OF_A_ROLE = "process of a role"


@attrs.frozen
class WorkerFound:
    """Process that runs `colocate.worker`: a worker, a supervisor or a template."""

    pid: int  # process id
    starter: int  # pid of the process that started this one
    # Whether the starter is gone. (A worker's forked child shows the worker's command line, but lives below the
    # worker.)
    orphan: bool
    label: str  # the worker's id, or the id of the reservation whose keeper started the worker
    since: float  # start time, in seconds of time.time()


@attrs.frozen
class Left:
    """Leftover process that a worker's roles have started, and that has outlived the worker and both supervisors."""

    pid: int  # process id
    since: float  # start time, in seconds of time.time()
    label: str  # label of the worker; empty when the process has cleared the environment
    starter: int  # pid of the process that started the worker
    name: str  # name of the program

    def running(self, node: str = "") -> Running:
        """Return the entry for an audit."""
        worker = f"worker {self.label}" if self.label else f"a worker of a runtime of process {self.starter}"
        detail = f"{worker}, whose role started it, and what should have ended it with that are gone"
        return Running(OF_A_ROLE, self.name, node=node, pid=self.pid, since=self.since, detail=detail)


@attrs.frozen
class Child:
    """A process that this very process has started."""

    started: int  # process id; for a worker, of the upper supervisor
    pid: int  # process id; for a worker, of the worker itself
    since: float  # start time, in seconds of time.time()
    label: str  # label of the worker; empty for other processes, and after a change of the command line


def below_this() -> list[Child]:
    """Return the running children of this very process, without zombies; for a worker, the worker's own process."""
    this = psutil.Process()
    below: dict[int, list[psutil.Process]] = {}
    for process in this.children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                below.setdefault(process.ppid(), []).append(process)
        except psutil.Error:  # the process is gone
            continue
    children = []
    for process in below.get(this.pid, []):
        try:
            arguments, shown = arguments_of(process, MODULE), process
            # A supervisor's first child is the supervised process; without one the supervisor is just starting, or
            # ending.
            for _ in range(0 if arguments is None else SUPERVISORS):
                shown = min(below.get(shown.pid, [shown]), key=lambda child: (child.create_time(), child.pid))
            label = "".join((arguments or [])[3:4]).strip()  # a template has no label
            children.append(Child(process.pid, shown.pid, shown.create_time(), label))
        except psutil.Error:  # the process is gone
            continue
    return children


def worker_below(started: int) -> int | None:
    """Return a worker's own process, or a supervisor without a child yet; None when the worker has ended.

    Args:
        started: The worker's upper supervisor, a child of this very process. Children of other processes aren't seen.
    """
    try:
        if psutil.Process(started).ppid() != os.getpid():  # the supervisor has ended, and the id was reused
            return None
        for _ in range(SUPERVISORS):
            with open(f"/proc/{started}/task/{started}/children") as file:
                started = next(map(int, file.read().split()), started)  # the oldest child comes first
    except (psutil.Error, OSError):
        return None
    return started


def has_ended(started: int) -> bool:
    """Return whether a worker has ended, though `started`, the upper supervisor, still ends the descendants."""
    worker = worker_below(started)
    try:
        return worker is None or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:  # just ended
        return True


def left_by(starter: int | None = None) -> list[Left]:
    """Return processes that workers have left behind: marked as a worker's, but outside of the starter's descendants.

    Args:
        starter: Only leftovers of this process's workers, forks of a worker included; None for the whole machine,
            without forks of workers (see `of_this_machine`).
    """
    leftovers = []
    for process in psutil.process_iter():
        try:
            mark, _, label = process.environ().get(MARK, "").partition(" ")
            above = int(mark) if mark.isdigit() else starter_of(process.rlimit(psutil.RLIMIT_RTTIME)[0])
            if above is None or (starter is not None and above != starter):
                continue
            if starter is None and arguments_of(process, MODULE) is not None:
                continue
            if process.status() != psutil.STATUS_ZOMBIE and above not in {parent.pid for parent in process.parents()}:
                name = label if mark.isdigit() else ""
                leftovers.append(Left(process.pid, process.create_time(), name, above, process.name()))
        except (psutil.Error, OSError):  # gone, or owned by another user
            continue
    return leftovers


def of_this_machine() -> list[WorkerFound]:
    """Return all workers of this machine, as far as the processes are visible."""
    workers = []
    for process in psutil.process_iter():
        try:
            arguments = arguments_of(process, MODULE)
            if arguments is None or len(arguments) < 2 or not arguments[1].isdigit():
                continue
            starter = int(arguments[1])
            orphan = starter not in {parent.pid for parent in process.parents()}
            label = "".join(arguments[3:4]).strip()
            workers.append(WorkerFound(process.pid, starter, orphan, label, process.create_time()))
        except (psutil.Error, OSError):  # gone, or owned by another user
            continue
    return workers


def arguments_of(process: psutil.Process, module: str) -> list[str] | None:
    """Return the arguments of a process that runs a module; None for another program.

    Raises:
        psutil.Error: The process can't be inspected.
    """
    words = process.cmdline()
    for index, word in enumerate(words):
        if word == module and index and words[index - 1] == "-m":
            return words[index + 1 :]
    return None
