"""Worker processes as the operating system shows them: whose they are is on their command lines."""

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
    """A process that runs `colocate.worker`: a worker, one of its supervisors, or a template."""

    pid: int  # its process id
    starter: int  # the process that started it
    orphan: bool  # whether that one is gone. (A forked child of a worker has its command line, but lives below it.)
    label: str  # what it was started for: the id of its worker, or that of the reservation whose keeper started it
    since: float  # when it was started, in seconds of time.time()


@attrs.frozen
class Left:
    """A process that a worker's roles have started, and that has outlived the worker and its supervisors."""

    pid: int  # its process id
    since: float  # when it was started, in seconds of time.time()
    label: str  # what the worker was started for; empty when the process has cleared its environment
    starter: int  # the process that started the worker
    name: str  # of the program that it runs

    def running(self, node: str = "") -> Running:
        """Return the same as an audit takes it."""
        worker = f"worker {self.label}" if self.label else f"a worker of a runtime of process {self.starter}"
        detail = f"{worker}, whose role started it, and what should have ended it with that are gone"
        return Running(OF_A_ROLE, self.name, node=node, pid=self.pid, since=self.since, detail=detail)


@attrs.frozen
class Child:
    """A process that this very process has started."""

    started: int  # its process id; of a worker that of the upper supervisor
    pid: int  # the same; of a worker that of its own process
    since: float  # when it was started, in seconds of time.time()
    label: str  # what it was started for; empty when it isn't a worker's, or has changed its command line


def below_this() -> list[Child]:
    """Return what this very process has started, and runs; of a worker its own process. Zombies run nothing."""
    this = psutil.Process()
    below: dict[int, list[psutil.Process]] = {}
    for process in this.children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                below.setdefault(process.ppid(), []).append(process)
        except psutil.Error:  # gone
            continue
    found = []
    for process in below.get(this.pid, []):
        try:
            told, shown = arguments_of(process, MODULE), process
            # A supervisor's first child is the one that it is there for; without one it is just starting, or ending.
            for _ in range(0 if told is None else SUPERVISORS):
                shown = min(below.get(shown.pid, [shown]), key=lambda child: (child.create_time(), child.pid))
            label = "".join((told or [])[3:4]).strip()  # a template has none
            found.append(Child(process.pid, shown.pid, shown.create_time(), label))
        except psutil.Error:  # gone
            continue
    return found


def worker_below(started: int) -> int | None:
    """Return a worker's own process, or the supervisor that has none yet; None when it has ended. Nobody else is seen.

    Args:
        started: Its upper supervisor, which this very process has started.
    """
    try:
        if psutil.Process(started).ppid() != os.getpid():  # it has ended, and another one has its id
            return None
        for _ in range(SUPERVISORS):
            with open(f"/proc/{started}/task/{started}/children") as file:
                started = next(map(int, file.read().split()), started)  # the oldest is the first
    except (psutil.Error, OSError):
        return None
    return started


def has_ended(started: int) -> bool:
    """Return whether a worker has ended, though `started`, its upper supervisor, still sees to what it had."""
    worker = worker_below(started)
    try:
        return worker is None or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:  # just now
        return True


def left_by(starter: int | None = None) -> list[Left]:
    """Return what workers have started and left behind: it has their mark, and isn't below who started them any more.

    Args:
        starter: Only what those of this process have, forks of the worker among it; of all machines' workers those are
            found as workers (`of_this_machine`).
    """
    found = []
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
                found.append(Left(process.pid, process.create_time(), name, above, process.name()))
        except (psutil.Error, OSError):  # gone, or somebody else's
            continue
    return found


def of_this_machine() -> list[WorkerFound]:
    """Return all workers of this machine, as far as its processes can be seen."""
    found = []
    for process in psutil.process_iter():
        try:
            told = arguments_of(process, MODULE)
            if told is None or len(told) < 2 or not told[1].isdigit():
                continue
            starter = int(told[1])
            orphan = starter not in {parent.pid for parent in process.parents()}
            label = "".join(told[3:4]).strip()
            found.append(WorkerFound(process.pid, starter, orphan, label, process.create_time()))
        except (psutil.Error, OSError):  # gone, or somebody else's
            continue
    return found


def arguments_of(process: psutil.Process, module: str) -> list[str] | None:
    """Return the arguments of a process that runs a module; None when it runs something else.

    Raises:
        psutil.Error: It can't be looked at.
    """
    words = process.cmdline()
    for index, word in enumerate(words):
        if word == module and index and words[index - 1] == "-m":
            return words[index + 1 :]
    return None
