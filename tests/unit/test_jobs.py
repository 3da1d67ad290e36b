"""Threads of the framework: jobs in order, timers, faults, and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from colocate._system.jobs import JobThread
from colocate.testing.waiting import PATIENCE_S


@pytest.fixture
def faults() -> list[BaseException]:
    return []


@pytest.fixture
def jobs(faults: list[BaseException]) -> Iterator[JobThread]:
    made = JobThread("test-jobs", faults.append)
    yield made
    assert made.close()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), ValueError("on purpose")])
def test_a_job_that_raises(jobs: JobThread, faults: list[BaseException], error: BaseException) -> None:
    """The owner is told whatever it is, and the jobs after it run."""

    def fail() -> None:
        raise error

    ran = threading.Event()
    jobs.soon(fail)
    jobs.after(0.0, ran.set)
    assert ran.wait(PATIENCE_S)
    assert faults == [error]


def test_jobs_after_the_end(faults: list[BaseException]) -> None:
    """What is queued runs before the end, what comes later at once; timers never."""
    jobs = JobThread("test-jobs", faults.append)
    ran: list[str] = []
    jobs.soon(lambda: ran.append("queued"))
    jobs.after(0.0, lambda: ran.append("queued timer") if ran else None)
    assert jobs.close()
    jobs.soon(lambda: ran.append("late"))
    jobs.run(lambda: ran.append("run"))
    jobs.after(0.0, lambda: ran.append("late timer"))
    assert [name for name in ran if "timer" not in name] == ["queued", "late", "run"]
    assert "late timer" not in ran
    unused = JobThread("test-jobs", faults.append)
    assert unused.close()
    unused.soon(lambda: ran.append("unused"))
    assert ran[-1] == "unused"
