"""Worker processes as the operating system shows them: whose they are is on their command lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import psutil

MODULE = "colocate.worker"


@attrs.frozen
class WorkerFound:
    """A process that runs `colocate.worker`.

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
class Child:
    """A process that this very process has started.

    Attributes:
        pid: Its process id.
        since: When it was started, in seconds of time.time().
        label: What it was started for; empty when it isn't a worker's, or has changed its command line.
    """

    pid: int
    since: float
    label: str


def below_this() -> list[Child]:
    """What this very process has started, and runs. Zombies run nothing."""
    found = []
    for process in psutil.Process().children():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                told = arguments_of(process, MODULE)
                found.append(Child(process.pid, process.create_time(), "".join((told or [])[3:4])))
        except psutil.Error:  # gone
            continue
    return found


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
            orphan = starter not in {process.ppid(), *(parent.pid for parent in process.parents())}
            yield WorkerFound(process.pid, starter, orphan, "".join(told[3:4]), process.create_time())
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
