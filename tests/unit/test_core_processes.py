"""Worker processes: starts that fail half way, output that nobody takes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

import colocate
from colocate import Role, RoleStartError, Runtime, WorkerDied, method
from colocate._system.room import OomKills
from colocate.testing.waiting import PATIENCE_S, wait_until


class Talker(Role):
    @method
    def say(self, text: str) -> int:
        print(text)
        return 1

    @method
    def write(self, text: str) -> int:
        sys.stderr.write(text)
        return 1

    @method
    def pid(self) -> int:
        return os.getpid()

    @method
    def leave(self) -> None:
        os._exit(3)


def workers(runtime: Runtime) -> list[str]:
    return [one.id for one in runtime._node.services.executor.running() if one.kind == "worker"]


@pytest.fixture
def runtime() -> Any:
    with colocate.connect("local", processes=True) as runtime:
        runtime.reserve(1, cpus=0).spawn({"talker": colocate.role(Talker)}).close()  # starts the runtime's threads
        yield runtime


def test_no_descriptor_left(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that can't be watched isn't left running, and the error says what was lacking."""
    before = len(os.listdir("/proc/self/fd"))

    def fail(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    with runtime.reserve(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", fail)
            with pytest.raises(RoleStartError, match=r"could not be started: OSError.*Too many open files"):
                pool.spawn({"talker": colocate.role(Talker)})
        wait_until(lambda: not workers(runtime), "the worker is no longer listed")
        assert len(os.listdir("/proc/self/fd")) == before
        assert pool.spawn({"talker": colocate.role(Talker)}).role("talker", Talker).say("fine") == [1]


def test_interrupted_start(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a process is being started: that one is ended too."""
    run = runtime._node.services.executor._launcher.run  # type: ignore[attr-defined]

    def interrupted(job: Any) -> None:
        run(job)
        raise KeyboardInterrupt

    with runtime.reserve(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(runtime._node.services.executor._launcher, "run", interrupted)  # type: ignore[attr-defined]
            with pytest.raises(KeyboardInterrupt):
                pool.spawn({"talker": colocate.role(Talker)})
        wait_until(lambda: not workers(runtime), "the worker is no longer listed")


STOPPED_AT_ONCE = """
import os, signal, socket
from colocate.keeper.process import WorkerProcess
from colocate.wire import EventLoop

process = WorkerProcess(EventLoop("test"), None)
lane = socket.socketpair()
process.start(dict(os.environ), lane[1])
os.kill(process.pid, signal.SIGSTOP)
os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_stopped_as_it_starts() -> None:
    """A worker that was stopped before it could say that it wants to die with its driver dies with it."""
    # In a session of its own: whoever inherits the orphan mustn't be of the same, or somebody could continue it.
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_AT_ONCE], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as driver:
        assert driver.stdout is not None
        worker = int(driver.stdout.readline())
        try:
            assert driver.wait(PATIENCE_S) == -signal.SIGKILL
            wait_until(lambda: not psutil.pid_exists(worker), "the worker has ended")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def test_last_words(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a role has printed is in the error of its worker's death, whatever Python is told of buffers."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    talker = runtime.reserve(1).spawn({"talker": colocate.role(Talker)}).role("talker", Talker)
    talker.say("my last words")
    with pytest.raises(WorkerDied) as caught:
        talker.leave()
    assert caught.value.log_tail == "my last words"


def test_closed_stderr(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's death is heard of although what it wrote can't be shown."""
    talker = runtime.reserve(1).spawn({"talker": colocate.role(Talker)}).role("talker", Talker)
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", closed)
        talker.write("a line\nand half of one")
        with pytest.raises(WorkerDied) as caught:
            talker.leave.submit().result(60)
    assert caught.value.log_tail == "a line\nand half of one"


def test_line_without_end(runtime: Runtime) -> None:
    """What never ends its line doesn't fill the driver's memory: a long line, or a progress bar."""
    group = runtime.reserve(1).spawn({"talker": colocate.role(Talker)})
    talker = group.role("talker", Talker)
    worker: Any = group._node.workforce.workers[0]
    process = worker.host._process
    for _ in range(30):
        talker.write("#" * 1000)
    wait_until(lambda: sum(map(len, worker._tail)) + len(process._partial) >= 16_384, "most has come, but for buffers")
    assert len(process._partial) <= 8192
    for _ in range(30):
        talker.write("\r" + "#" * 1000)
    talker.write("\rlast")
    wait_until(lambda: process._partial.endswith(b"last"), "all of it has come")
    assert len(process._partial) <= 8192


@pytest.mark.parametrize("killed", [None, "the kernel has killed a process for lack of memory"])
def test_out_of_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, killed: str | None) -> None:
    """A worker that is killed while the kernel lacks memory: the error says that."""
    monkeypatch.setattr(OomKills, "since", lambda before: killed)
    with runtime.reserve(1) as pool:
        group = pool.spawn({"talker": colocate.role(Talker)})
        pid = group.role("talker", Talker).pid()[0]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            group.role("talker", Talker).say("late")
        assert caught.value.signal == "SIGKILL"
        assert caught.value.detail == killed
