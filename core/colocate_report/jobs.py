"""List the jobs that run on this machine. Each job listens on an abstract Unix socket, by which it is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from colocate.driver import listening

_NAME = "colocate-job"
_LONGEST = 64  # The most bytes of a name, because a socket's address has a limited length.


class Job(NamedTuple):
    """A job that runs on this machine."""

    name: str
    pid: int  # The process id of the driver.
    number: int = 1  # The job's number within the process, counted from 1.

    @property
    def id(self) -> str:
        """The job's identifier on this machine."""
        return f"{self.pid}/{self.number}"


def list_jobs() -> list[Job]:
    """Return all jobs that run on this machine, of any user."""
    found = listening(rf"{_NAME}/(\d+)/(\d+)/(.+)")
    return sorted(Job(each[3], int(each[1]), int(each[2])) for each in found)


def shorten_name(name: str) -> str:
    """Shorten a job's name to the form that `list_jobs` returns."""
    line = "".join(letter if letter.isprintable() else "_" for letter in name)
    return line.encode(errors="surrogateescape")[:_LONGEST].decode(errors="ignore")


def matches_job(job: str, given: str) -> bool:
    """Return whether a name or folder refers to a job. The name demo also refers to demo-2 and later runs."""
    name = shorten_name(Path(given).name)
    return job in (shorten_name(given), name) or re.fullmatch(rf"{re.escape(name)}-\d+", job) is not None


def job_address(job: Job) -> str:
    """Return the address of a job's socket."""
    return f"\0{_NAME}/{job.pid}/{job.number}/{job.name}"
