"""Worker processes as the operating system shows them: whose they are is on their command lines."""

from __future__ import annotations

import os
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


def below_this() -> list[WorkerFound]:
    """Those that this very process has started. Zombies, which run nothing, aren't among them."""
    return [found for found in _found(psutil.Process().children()) if found.starter == os.getpid()]


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
