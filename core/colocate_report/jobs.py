"""List the jobs that run on this machine, by the abstract sockets of their windows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from colocate.driver import listening

_NAME = "colocate-job"
_LONGEST = 64  # bytes of a name in a socket's address, whose length is limited


class Job(NamedTuple):
    """A running job."""

    name: str
    pid: int  # process of the driver
    number: int = 1  # number of the job within the process, from 1

    @property
    def id(self) -> str:
        """The job's identifier on this machine."""
        return f"{self.pid}/{self.number}"


def jobs() -> list[Job]:
    """Return all jobs that run on this machine, of any user."""
    found = listening(rf"{_NAME}/(\d+)/(\d+)/(.+)")
    return sorted(Job(each[3], int(each[1]), int(each[2])) for each in found)


def short(name: str) -> str:
    """Shorten a job's name to the form that `jobs` lists."""
    line = "".join(letter if letter.isprintable() else "_" for letter in name)
    return line.encode(errors="surrogateescape")[:_LONGEST].decode(errors="ignore")


def is_called(job: str, given: str) -> bool:
    """Return whether a given name or folder means this job; the name of a run's first folder means later runs, too."""
    name = short(Path(given).name)
    return job in (short(given), name) or re.fullmatch(rf"{re.escape(name)}-\d+", job) is not None


def address(job: Job) -> str:
    """Return the address of a job's socket."""
    return f"\0{_NAME}/{job.pid}/{job.number}/{job.name}"
