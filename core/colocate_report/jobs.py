"""The jobs that run on this machine, by the sockets without a file through which they are looked at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from colocate.driver import listening

_NAME = "colocate-job"
_LONGEST = 64  # bytes of a name: a socket's has a limit


class Job(NamedTuple):
    """A job that runs."""

    name: str
    pid: int  # its driver's process
    number: int = 1  # which one it is there: a process may run several

    @property
    def id(self) -> str:
        """Return what tells it apart on its machine."""
        return f"{self.pid}/{self.number}"


def jobs() -> list[Job]:
    """The jobs that run on this machine, of whichever user."""
    found = listening(rf"{_NAME}/(\d+)/(\d+)/(.+)")
    return sorted(Job(each[3], int(each[1]), int(each[2])) for each in found)


def short(name: str) -> str:
    """The name by which `jobs` lists a job of that name."""
    line = "".join(letter if letter.isprintable() else "_" for letter in name)
    return line.encode(errors="surrogateescape")[:_LONGEST].decode(errors="ignore")


def is_called(job: str, given: str) -> bool:
    """Return whether a job is meant: by its name, by its run's folder, or by a name of which it is a later run."""
    name = short(Path(given).name)
    return job in (short(given), name) or re.fullmatch(rf"{re.escape(name)}-\d+", job) is not None


def address(job: Job) -> str:
    """Return where a job is looked at."""
    return f"\0{_NAME}/{job.pid}/{job.number}/{job.name}"
