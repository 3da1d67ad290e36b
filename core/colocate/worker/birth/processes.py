"""Worker processes as the operating system shows them: whose they are is on their command lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
import psutil

from colocate.executor import Running
from colocate.worker.birth.supervisor import MARK, SUPERVISORS, starter_of

MODULE = "colocate.worker"
OF_A_ROLE = "process of a role"
_SHOWN = 200


@attrs.frozen
class WorkerFound:
    """A process that runs `colocate.worker`: a worker, one of its supervisors, or a template.

    Attributes:
        pid: Its process id.
        starter: The process that started it.
        orphan: Whether that one is gone. (A forked child of a worker has its command line, but lives below it.)
        label: What it was started for: the id of its worker, or that of the reservation whose keeper started it.
        since: When it was started, in seconds of time.time().
    """

    pid: int
    starter: int
    orphan: bool
    label: str
    since: float


@attrs.frozen
class Left:
    """A process that a worker's roles have started, and that has outlived the worker and its supervisors.

    Attributes:
        pid: Its process id.
        since: When it was started, in seconds of time.time().
        label: What the worker was started for; empty when the process has cleared its environment.
        starter: The process that started the worker.
        name: Of the program that it runs.
    """

    pid: int
    since: float
    label: str
    starter: int
    name: str

    def running(self, node: str = "") -> Running:
        """The same as an audit takes it."""
        worker = f"worker {self.label}" if self.label else f"a worker of a runtime of process {self.starter}"
        detail = f"{worker}, whose role started it, and what should have ended it with that are gone"
        return Running(OF_A_ROLE, self.name, node=node, pid=self.pid, since=self.since, detail=detail)


@attrs.frozen
class Child:
    """A process that this very process has started.

    Attributes:
        started: Its process id; of a worker that of the upper supervisor.
        pid: The same; of a worker that of its own process.
        since: When it was started, in seconds of time.time().
        label: What it was started for; empty when it isn't a worker's, or has changed its command line.
    """

    started: int
    pid: int
    since: float
    label: str


def below_this() -> list[Child]:
    """What this very process has started, and runs; of a worker its own process. Zombies run nothing."""
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
            told = arguments_of(process, MODULE)
            label = "".join((told or [])[3:4]).strip()  # a template has none
            shown = process if told is None else _worker_below(process, below)
            found.append(Child(process.pid, shown.pid, shown.create_time(), label))
        except psutil.Error:  # gone
            continue
    return found


def _worker_below(supervisor: psutil.Process, below: Mapping[int, list[psutil.Process]]) -> psutil.Process:
    """The worker's own process: a supervisor's first child is the one that it is there for."""
    process = supervisor
    for _ in range(SUPERVISORS):
        children = below.get(process.pid)
        if not children:  # it is just starting, or ending
            break
        process = min(children, key=lambda child: (child.create_time(), child.pid))
    return process


def program_instead_of_worker(started: int) -> str | None:
    """The command line of the program that has taken a worker's place by exec; None when none has, or nobody can tell.

    A worker is a fork of its supervisors: its memory begins where theirs does, which it doesn't after exec.

    Args:
        started: Its upper supervisor, which this process has started.
    """
    try:
        (worker,) = (child.pid for child in below_this() if child.started == started)
        if worker == started or _layout(worker) == _layout(started):
            return None
        return " ".join(psutil.Process(worker).cmdline())[:_SHOWN]
    except (ValueError, psutil.Error, OSError):  # it is gone
        return None


def _layout(pid: int) -> list[str]:
    """Where code and stack of a process begin."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return [fields[23], fields[25]]


def left_by(starter: int | None = None) -> list[Left]:
    """What workers have started and left behind: it has their mark, and isn't below who started them any more.

    Args:
        starter: Only that of the workers of this process, forks of the worker among them; of all machines' workers
            those are found as workers (`of_this_machine`).
    """
    found = []
    for process in psutil.process_iter():
        try:
            above, label = _mark_of(process)
            if above is None or (starter is not None and above != starter):
                continue
            of_worker = starter is None and arguments_of(process, MODULE) is not None
            if not of_worker and _is_apart(process, above):
                found.append(Left(process.pid, process.create_time(), label, above, process.name()))
        except (psutil.Error, OSError):  # gone, or somebody else's
            continue
    return found


def _mark_of(process: psutil.Process) -> tuple[int | None, str]:
    """Who has started the worker that a process descends from, and what for, as far as it shows."""
    above, _, label = process.environ().get(MARK, "").partition(" ")
    if above.isdigit():
        return int(above), label
    return starter_of(process.rlimit(psutil.RLIMIT_RTTIME)[0]), ""


def _is_apart(process: psutil.Process, starter: int) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE and starter not in {parent.pid for parent in process.parents()}


def of_this_machine() -> list[WorkerFound]:
    """All of this machine, as far as its processes can be seen."""
    return list(_found(psutil.process_iter()))


def _found(processes: Iterable[psutil.Process]) -> Iterator[WorkerFound]:
    for process in processes:
        try:
            told = arguments_of(process, MODULE)
            if told is None or len(told) < 2 or not told[1].isdigit():
                continue
            starter = int(told[1])
            orphan = starter not in {parent.pid for parent in process.parents()}
            yield WorkerFound(process.pid, starter, orphan, "".join(told[3:4]).strip(), process.create_time())
        except (psutil.Error, OSError):  # gone, or somebody else's
            continue


def arguments_of(process: psutil.Process, module: str) -> list[str] | None:
    """The arguments of a process that runs a module; None when it runs something else.

    Raises:
        psutil.Error: It can't be looked at.
    """
    words = process.cmdline()
    for index, word in enumerate(words):
        if word == module and index and words[index - 1] == "-m":
            return words[index + 1 :]
    return None
