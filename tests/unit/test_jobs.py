"""Threads of the framework: jobs in order, timers, faults, and the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from tests.suite.probes.starved import without_threads

from colocate._system.jobs import JobThread
from colocate._system.threads import Thread
from colocate.testing.waiting import PATIENCE_S

# Some threads get a stack, but too little memory to begin.
STARVED = """
import resource, threading
from colocate._system.jobs import JobThread

threading.stack_size(1 << 20)
warm = JobThread("warm", print)
warm.run(int)
with open("/proc/self/status") as status:
    size = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmSize"))
refused = 0
for more in range(1 << 20, (1 << 20) + (1 << 17), 1 << 13):
    jobs = JobThread("jobs", print)
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
    try:
        jobs.start()
    except RuntimeError:
        refused += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    jobs.run(int)
    jobs.close()
print(refused > 1, [each.name for each in threading.enumerate()])
"""


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
    """A job's exception of any type is reported to the owner, and later jobs run."""

    def fail() -> None:
        raise error

    ran = threading.Event()
    jobs.call_soon(fail)
    jobs.call_later(0.0, ran.set)
    assert ran.wait(PATIENCE_S)
    assert faults == [error]


def test_jobs_after_the_end(faults: list[BaseException]) -> None:
    """Queued jobs run before the end, and later ones at once; a late timer never runs."""
    jobs = JobThread("test-jobs", faults.append)
    ran: list[str] = []
    jobs.call_soon(lambda: ran.append("queued"))
    jobs.call_later(0.0, lambda: ran.append("queued timer") if ran else None)
    assert jobs.close()
    jobs.call_soon(lambda: ran.append("late"))
    jobs.run(lambda: ran.append("run"))
    jobs.call_later(0.0, lambda: ran.append("late timer"))
    assert [name for name in ran if "timer" not in name] == ["queued", "late", "run"]
    assert "late timer" not in ran
    unused = JobThread("test-jobs", faults.append)
    assert unused.close()
    unused.call_soon(lambda: ran.append("unused"))
    assert ran[-1] == "unused"


def test_close_during_start_in_another_thread(faults: list[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread starts it, a close without a wait returns False; one that waits sees the job run."""
    jobs = JobThread("test-jobs", faults.append)
    amid, go_on = threading.Event(), threading.Event()
    begin = Thread.start

    def start(thread: Thread) -> None:
        amid.set()
        assert go_on.wait(PATIENCE_S)
        begin(thread)

    ran: list[str] = []
    starter = threading.Thread(target=jobs.call_soon, args=(lambda: ran.append("job"),))
    with monkeypatch.context() as slow:
        slow.setattr(Thread, "start", start)
        starter.start()
        assert amid.wait(PATIENCE_S)
        assert not jobs.close(0.0)
        go_on.set()
        assert jobs.close()
        starter.join()
    assert ran == ["job"]


@pytest.mark.parametrize("dies", [False, True])
def test_a_thread_that_cannot_begin(jobs: JobThread, dies: bool) -> None:
    """A caller for whom no thread can start gets the error, no thread is left, and the next job gets one."""
    ran: list[int] = []
    with without_threads(dies), pytest.raises(RuntimeError, match="can't start new thread"):
        jobs.call_soon(lambda: ran.append(0))
    assert "test-jobs" not in {each.name for each in threading.enumerate()}
    jobs.run(lambda: ran.append(1))
    assert ran == [1]


def test_threads_without_memory() -> None:
    """A thread without memory begins or is refused, and none is left."""
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "True ['MainThread', 'warm']\n", done.stderr
