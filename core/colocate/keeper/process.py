"""A worker process of this machine: started, watched, ended; its output by lines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from colocate import wire
from colocate._system.ends import hear_of_ends
from colocate._system.jobs import JobThread, report_exception
from colocate._system.limits import LOOKED_AT_WITHIN_S
from colocate._system.room import OomKills
from colocate._system.threads import Thread
from colocate.keeper.forks import Fork, NoFork, fork, started
from colocate.worker.birth import processes
from colocate.worker.birth.supervisor import CLOSES_OTHERS, ENDS, MARK
from colocate.worker.serving.output import shown, written_over

_LINE_BYTES = 8192  # a line without an end is shown by pieces
_BAR_EVERY_S = 1.0  # one that is written over, a progress bar's, is shown as it is then
# A worker whose lane has closed leaves by itself, after its exit handlers; after so many seconds it is made to.
_LAST_READS = 16
AFTER_LANE_S = 1.0
_NO_LANE = (
    f"it had closed its connection to the driver and gone on, and was ended; {CLOSES_OTHERS}, and so does "
    "os.exec, which puts another program in a worker's place: start programs with subprocess"
)
_UNKNOWN = "its exit code isn't known: other code of the process that has started it has waited for it"

_logger = logging.getLogger("colocate")

_looks = threading.Semaphore(4)
"""As many workers are looked at together: each by a process of its own, on a machine that is busy enough."""


class Launcher(JobThread):
    """The thread that starts worker processes: the kernel ties their lives to it, so it lives as long as they may.

    It runs jobs one after the other; `run` waits for one, `soon` doesn't, `close` ends it.
    """

    def __init__(self) -> None:
        """Make it; the thread starts with the first job."""
        super().__init__("colocate-launcher", lambda error: report_exception())


class ProcessEvents(Protocol):
    """What the owner of a worker process hears of it, on the event loop's thread."""

    def said(self, line: str) -> None:
        """A line of its output; with a carriage return at its end it isn't the last state of that line."""

    def ended(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        """Hear that the process is gone, once and last: exit code or name of a signal, and why it was ended, if so."""


class WorkerProcess:
    """A process that runs `colocate.worker`, below its supervisors. It dies with this one, even when that is killed.

    What is started, watched and waited for here is the upper supervisor, which ends as the worker has, when nothing is
    left of that. It leads a process group from its first moment. Until it has told the kernel that it wants to die with
    this process it may be stopped; when this one ends then, the kernel finds stopped processes in a group that nobody
    of the session is left to continue, and hangs them up (`setpgid(2)`: orphaned process groups).
    """

    def __init__(self, event_loop: wire.EventLoop, events: ProcessEvents) -> None:
        self._event_loop = event_loop
        self._events = events
        self._process: Fork | None = None
        self._pidfd = -1
        self._lock = threading.Lock()  # a descriptor that is closed may be another process's at once
        self._log = -1
        self._partial = b""
        self._bar_shown_at = 0.0
        self._is_astray = False
        self._oom_kills = OomKills.now()

    @property
    def pid(self) -> int:
        """The id of the process that was started, the upper supervisor; 0 before it is."""
        return self._process.pid if self._process is not None else 0

    @property
    def over(self) -> bool:
        """Whether it is known to have ended."""
        return self._process is not None and self._process.over

    def start(
        self,
        env: Mapping[str, str],
        sock: socket.socket,
        *,
        base: Mapping[str, str] | None = None,
        waits: bool = False,
        label: str = "",
        imports: Sequence[str] | None = (),
    ) -> None:
        """Start it: fork it, or where that can't be, by itself. On a launcher's thread, with which it ends then.

        Args:
            env: All of its environment.
            sock: The other end of its lane (its own to close), or of a socket on which that end will come (`waits`).
            base: What its environment would be if nobody had asked for another; None for this process's.
            waits: Whether it waits for its lane.
            label: Whose it is, for whoever looks at the processes of this machine.
            imports: What its roles need (`Boot.imports`).

        Raises:
            OSError: It couldn't be started; nothing is left.
        """
        hear_of_ends()
        self._log, output = os.pipe()
        try:
            arguments = [str(os.getpid()), "waits" if waits else "serves", label.replace("\0", "")]
            env = {**env, MARK: f"{os.getpid()} {label}".replace("\0", "")}
            try:
                self._process = fork(arguments, env, os.environ if base is None else base, sock, output, imports)
            except NoFork as why:
                _logger.info("worker %s is started by itself, not forked: %s", label, why)
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "colocate.worker", str(sock.fileno()), *arguments],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[sock.fileno()],
                    process_group=0,
                )
                self._process = started(process)
        except BaseException:
            os.close(self._log)
            raise
        finally:
            os.close(output)
        os.set_blocking(self._log, False)
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._event_loop.watch(self._log, self._read_log)
            self._event_loop.watch(self._pidfd, self._ended)
        except BaseException:  # no descriptor is left, or the event loop is closed
            self._process.kill()
            self._process.wait()
            self._process = None
            self._event_loop.unwatch(self._log)
            self._close_descriptors()
            raise

    def kill(self) -> None:
        """End it now, and all that it has started. From any thread; harmless when it is gone."""
        with self._lock, contextlib.suppress(OSError):  # it is gone already
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, ENDS)
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)  # a supervisor that is stopped must hear it

    def reap(self) -> None:
        """End it and wait for that, in the place of an event loop that does nothing any more. Told as any other end."""
        self.kill()
        if self._process is not None and not self.over:
            self._ended()

    def look(self, then: Callable[[str | None], None]) -> None:
        """Say, on a thread of its own, what is seen of it from outside: see `Host.look`."""

        def run() -> None:
            from colocate.keeper.outside import seen  # it needs more than a keeper does that is never asked

            if not _looks.acquire(timeout=LOOKED_AT_WITHIN_S):
                then(None)
                return
            try:
                then(seen(self.pid))
            finally:
                _looks.release()

        try:
            Thread(target=run, name="colocate-look").start()
        except RuntimeError:  # no thread is to be had
            then(None)

    # -- on the event loop's thread

    def end_astray(self) -> None:
        """End one that has closed its lane and goes on; that is told with its end."""
        self._is_astray |= self._process is not None and not self.over and not processes.has_ended(self.pid)
        self.kill()

    def _read_log(self) -> None:
        try:
            data = os.read(self._log, 65536)
        except BlockingIOError:
            return
        if not data:
            self._event_loop.unwatch(self._log)
            return
        *lines, rest = (self._partial + data).split(b"\n")
        while len(rest) > _LINE_BYTES:
            lines.append(rest[:_LINE_BYTES])
            rest = rest[_LINE_BYTES:]
        self._partial = rest
        for line in lines:
            self._say(line)
        if b"\r" in rest:
            self._partial = written_over(rest)
            if time.monotonic() - self._bar_shown_at >= _BAR_EVERY_S:
                self._bar_shown_at = time.monotonic()
                self._say(rest, "\r")

    def _say(self, line: bytes, ends: str = "") -> None:
        self._events.said(shown(line.decode(errors="replace")) + ends)

    def _ended(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        self._event_loop.unwatch(self._pidfd)
        with contextlib.suppress(BlockingIOError):  # a child of the worker still has the pipe
            for _ in range(_LAST_READS):  # one that has left the process group may write for ever
                if not (data := os.read(self._log, 65536)):
                    break
                self._partial += data
        self._event_loop.unwatch(self._log)
        for line in self._partial.removesuffix(b"\n").split(b"\n") if self._partial else ():
            self._say(line)
        self._close_descriptors()
        if code == -ENDS:  # it was killed before it had put supervisors above itself
            code = -signal.SIGKILL
        name = signal.Signals(-code).name if code is not None and code < 0 else None
        why = (_NO_LANE if self._is_astray else self._oom_kills.since()) if code == -signal.SIGKILL else None
        if why is None and code is None:
            why = _UNKNOWN
        self._events.ended(None if name is not None else code, name, why)

    def _close_descriptors(self) -> None:
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pidfd = -1
        os.close(self._log)
