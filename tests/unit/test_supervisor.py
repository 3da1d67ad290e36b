"""A worker's supervisors: all processes that its roles have started end with it, however worker or supervisor ends."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

import colocate
from colocate._plugins import strays
from colocate.keeper import outside
from colocate.testing.probes.faulty import Parent
from colocate.testing.probes.plain import Echo
from colocate.testing.waiting import Processes, send_signal, wait_until
from colocate.worker.birth import processes, supervisor
from colocate.worker.birth.supervisor import SUPERVISORS

# A starter: runs the test's worker, prints the pids of the top supervisor and the worker, and waits.
STARTER = """
import os, subprocess, sys
worker = sys.argv[1]
code = "import os, sys; from colocate.worker.birth.supervisor import supervise; supervise(int(sys.argv[1]))\\n" + worker
command = [sys.executable, "-P", "-c", code, str(os.getpid())]
process = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
print(process.pid, process.stdout.readline().decode(), flush=True)
sys.stdin.read()
"""
# Processes in other sessions, some of whose parents have exited.
FAMILY = """
import signal, subprocess
orphans = "sleep 1000 & setsid sh -c 'sleep 1000 & sleep 1000' & exit 0"
subprocess.Popen(["sh", "-c", orphans], start_new_session=True).wait()
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(os.getpid(), flush=True)
"""


@contextlib.contextmanager
def started(worker: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield a starter, and the pids of the supervisors and the worker below it."""
    command = [sys.executable, "-c", STARTER, worker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        top, last = map(int, starter.stdout.readline().split())
        pids = [last]
        while pids[0] != top:
            parent = psutil.Process(pids[0]).ppid()
            pids.insert(0, parent)
        try:
            yield starter, pids
        finally:
            starter.kill()


def below(pid: int) -> Processes:
    return Processes([pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))])


@pytest.mark.parametrize(
    ("code", "status"),
    [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("os.abort()", -signal.SIGABRT)],
)
def test_supervisor_exits_like_worker(code: str, status: int) -> None:
    """A supervisor exits with its worker's code or signal, and the worker inherits a limit of real-time CPU."""
    told = f"""
import os, resource, sys
from colocate.worker.birth.supervisor import supervise
supervise(int(sys.argv[1]))
print(resource.getrlimit(resource.RLIMIT_RTTIME)[0], flush=True)
{code}
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", told, str(os.getpid())],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_RTTIME, (9_000_000, resource.RLIM_INFINITY)),
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "9000000\n", "")


def test_worker_leads_session_under_supervisors() -> None:
    """A worker leads a session and blocks no signal; supervisors hold nothing open, reap orphans and ignore signals."""
    code = """
import subprocess, signal
for _ in range(5): subprocess.run(["sh", "-c", "sh -c 'exit 3' & exit 0"])
print(os.getpid(), flush=True)
signal.pause()
"""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT, signal.SIGPIPE]
    with started(code) as (_, pids):
        assert len(pids) == SUPERVISORS + 1
        *supervisors, worker = pids
        assert os.getpgid(worker) == os.getsid(worker) == worker
        assert blocked(worker) == 0
        wait_until(lambda: [c.pid for c in psutil.Process(pids[1]).children()] == [worker], "the zombies are gone")
        for pid in supervisors:
            # The worker may be there before a supervisor has closed its descriptors.
            closed = f"supervisor {pid} holds nothing open"
            wait_until(lambda pid=pid: sorted(map(int, os.listdir(f"/proc/{pid}/fd"))) == [0, 1, 2], closed)  # type: ignore[misc]
            assert os.getpgid(pid) == supervisors[0]
            for number in numbers:  # signals of a terminal or a batch system are the driver's
                os.kill(pid, number)
            assert all(blocked(pid) >> number - 1 & 1 for number in (*numbers[:2], signal.SIGTSTP))
        os.kill(worker, signal.SIGSTOP)  # The worker runs, and can be stopped.
        wait_until(lambda: psutil.Process(worker).status() == psutil.STATUS_STOPPED, "the worker is there")
        # The lower supervisor has just been notified that its child has stopped.
        wait_until(
            lambda: {psutil.Process(pid).status() for pid in supervisors} == {psutil.STATUS_SLEEPING}, "both wait"
        )


def blocked(pid: int) -> int:
    """Return the signals that a process blocks, as bits."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0], 16)


def test_starter_may_read_worker_memory() -> None:
    """A worker allows its starter to read its memory, which Yama would refuse: stack dumps need it."""
    code = """if True:
        import os, sys
        from colocate.worker.birth import supervisor
        told, prctl = [], supervisor._prctl
        supervisor._prctl = lambda *args: (told.append((os.getpid(), *map(int, args))), prctl(*args))
        supervisor.supervise(int(sys.argv[1]))
        print((os.getpid(), int.from_bytes(b"Yama"), int(sys.argv[1])) in told)
    """
    command = [sys.executable, "-P", "-c", code, str(os.getpid())]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("stopped", ["upper", "lower", "worker"])
def test_though_one_is_stopped(stopped: str) -> None:
    """A worker's family ends with the starter, though the worker or a supervisor is stopped."""
    with started(FAMILY + "signal.pause()") as (starter, pids):
        family = below(pids[0])
        send_signal(pids[["upper", "lower", "worker"].index(stopped)], signal.SIGSTOP)
        starter.kill()
        if stopped == "upper":  # the only one that notices
            wait_until(lambda: psutil.Process(pids[0]).ppid() != starter.pid, "the starter is gone")
            os.kill(pids[0], signal.SIGCONT)
        family.wait_all()
        family.release_all()


def _pid(context: colocate.Context) -> int:
    return os.getpid()


def test_both_killed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If both supervisors are killed, the audit and the list of strays have the role's children until these end."""
    with colocate.connect("local", processes=True) as runtime:
        group = runtime.reserve(1).spawn({"parent": colocate.role(Parent)})
        ((*pids,),) = group.role("parent", Parent).start_children()
        (worker,) = group.run(_pid)
        assert not runtime.audit()
        lower = psutil.Process(worker).parent()
        upper = lower and lower.parent()
        assert lower is not None
        assert upper is not None
        for supervisor in (upper, lower):
            send_signal(supervisor.pid, signal.SIGSTOP)
        # The lower one first: the upper one's end orphans a group with a stopped member, which the kernel continues.
        # The lower one would then begin to end its children.
        for supervisor in (lower, upper):
            supervisor.kill()
        try:
            wait_until(lambda: group.state == "failed", "its end is heard of")
            with monkeypatch.context() as patch:  # the leftovers don't settle
                patch.setattr("colocate.features.looking.audit.AUDIT_SETTLES_S", 0.1)
                audit = runtime.audit()
            left = {each.pid: each for each in audit.leaked if each.kind == processes.OF_A_ROLE}
            assert set(pids) == set(left)
            for each in left.values():
                assert re.search(rf"worker {group._node.services.id}|of a runtime of process {os.getpid()}", str(each))
                assert str(each).endswith("end it by hand")
            assert set(pids) <= {each.pid for each in strays.list_strays()}
        finally:
            for found in processes.list_leftovers(os.getpid()):
                os.kill(found.pid, signal.SIGKILL)
        wait_until(lambda: not processes.list_leftovers(os.getpid()), "they are gone")
        assert not runtime.audit()
        with pytest.raises(ExceptionGroup, match="closed with errors"):
            group.close()


def test_one_that_is_looked_at_is_found_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is found without a look at all processes, which took minutes when many workers started."""

    def all_of_them(*args: object, **kwargs: object) -> None:
        raise AssertionError("all processes of the machine are looked at")

    with colocate.connect("local", processes=True) as runtime:
        group = runtime.reserve(2).spawn({"echo": colocate.role(Echo)})
        expected = {child.supervisor_pid: child.pid for child in processes.list_children() if child.label}
        assert len(expected) == 2
        wanted = set(group.run(lambda ctx: os.getpid()))
        monkeypatch.setattr(psutil, "process_iter", all_of_them)
        monkeypatch.setattr(psutil, "pids", all_of_them)
        monkeypatch.setattr(psutil.Process, "children", all_of_them)
        assert {processes.find_worker(started) for started in expected} == {*expected.values()} == wanted
        for started in expected:
            outside.inspect_worker(started)
        assert processes.find_worker(os.getpid()) is None  # This process is no child of its own.


@pytest.mark.parametrize("has_files", [True, False])
def test_descendants_are_found(monkeypatch: pytest.MonkeyPatch, has_files: bool) -> None:
    """Descendants are found, also those of threads; if the kernel lists children, without a look at other processes."""
    listed, exists = os.listdir, os.path.exists

    def listdir(path: str) -> list[str]:
        assert path != "/proc" or not has_files, "all processes of the machine are looked at"
        return listed(path)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os.path, "exists", lambda path: exists(path) and (has_files or "children" not in str(path)))
    command = ["sh", "-c", "sleep 1000 & echo $!; wait"]
    with ThreadPoolExecutor(1) as thread:
        started = thread.submit(partial(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)).result()
        with started, subprocess.Popen(["true"]) as ended:
            os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie has a pid, and runs nothing
            assert started.stdout is not None
            sleeps = int(started.stdout.readline())
            found = supervisor.list_descendants(os.getpid())
            assert {started.pid, sleeps} <= {*found}
            assert found.index(started.pid) < found.index(sleeps)
            assert ended.pid not in found
            assert supervisor.list_descendants(sleeps) == []
            os.kill(sleeps, signal.SIGKILL)
