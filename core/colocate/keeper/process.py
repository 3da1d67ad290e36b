"""A worker process on this machine: start, supervision, end, and output by lines."""

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
from colocate._system.ends import keep_exit_codes
from colocate._system.jobs import JobThread, report_exception
from colocate._system.limits import LOOKED_AT_WITHIN_S
from colocate._system.room import OomKills
from colocate._system.threads import Thread
from colocate.keeper.forks import Fork, NoFork, fork_worker, wrap_process
from colocate.worker.birth import processes
from colocate.worker.birth.supervisor import CLOSES_OTHERS, ENDS, MARK
from colocate.worker.serving.output import get_last_state, trim_overwritten

_LINE_BYTES = 8192  # A longer line is shown in pieces, without waiting for the end.
_BAR_EVERY_S = 1.0  # A progress bar, which overwrites one line, is shown again at this interval.
_LAST_READS = 16
# After the lane has closed, the worker has this long to run exit handlers and exit; then the worker is killed.
AFTER_LANE_S = 1.0
_NO_LANE = (
    f"it had closed its connection to the driver and gone on, and was ended; {CLOSES_OTHERS}, and so does "
    "os.exec, which puts another program in a worker's place: start programs with subprocess"
)
_UNKNOWN = "its exit code isn't known: other code of the process that has started it has waited for it"

_logger = logging.getLogger("colocate")

_inspections = threading.Semaphore(4)
"""Limits inspections to four at a time, because each inspection starts a process."""


class Launcher(JobThread):
    """The thread that starts worker processes.

    The thread lives as long as the workers may, because the kernel ends the workers with the thread.

    Jobs run one after the other. `run` waits for a job, `call_soon` doesn't, and `close` ends the thread.
    """

    def __init__(self) -> None:
        super().__init__("colocate-launcher", lambda error: report_exception())


class ProcessEvents(Protocol):
    """Callbacks for the owner of a worker process. All run on the event loop's thread."""

    def on_line(self, line: str) -> None:
        """Handle a line of output. A carriage return at the end means that a new line will overwrite this one."""

    def on_exit(self, exitcode: int | None, signal: str | None, detail: str | None) -> None:
        """Handle the exit of the process. Called once, as the last callback.

        Gets the exit code or the signal's name, and the reason if the process was killed.
        """


class WorkerProcess:
    """A process that runs `colocate.worker` below two supervisors.

    The process dies with this process, even if this process is killed by SIGKILL.

    The direct child of this process is the upper supervisor. It exits as the worker did, once no process of the worker
    is left, and leads a process group from the start. The supervisor may be stopped before it has asked the kernel to
    die with this process. If this process ends then, the kernel sends SIGHUP to the orphaned process group
    (`setpgid(2)`), because the group has a stopped member.
    """

    def __init__(self, event_loop: wire.EventLoop, events: ProcessEvents) -> None:
        self._event_loop = event_loop
        self._events = events
        self._process: Fork | None = None
        self._pidfd = -1
        # This lock guards `_pidfd`, because the number of a closed descriptor may be reused at once.
        self._lock = threading.Lock()
        self._log = -1
        self._partial = b""
        self._bar_shown_at = 0.0
        self._is_astray = False
        self._oom_kills = OomKills.read_now()

    @property
    def pid(self) -> int:
        """The process id of the upper supervisor; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether the process is known to have ended."""
        return self._process is not None and self._process.is_over

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
        """Start the process as a fork of the template, or else as a new interpreter.

        Runs on a launcher's thread, because the process ends with the thread.

        Args:
            env: All environment variables of the worker.
            sock: The other end of the worker's lane, which the caller closes. With `waits`, the other end of a socket
                on which the lane will be sent.
            base: The default environment of workers; None for the environment of this process.
            waits: Whether the worker waits until its lane is sent.
            label: The worker's owner, shown in process listings of the machine.
            imports: Modules that the roles need (`Boot.imports`).

        Raises:
            OSError: The process couldn't be started. No process or descriptor is left.
        """
        keep_exit_codes()
        self._log, output = os.pipe()
        try:
            arguments = [str(os.getpid()), "waits" if waits else "serves", label.replace("\0", "")]
            env = {**env, MARK: f"{os.getpid()} {label}".replace("\0", "")}
            try:
                self._process = fork_worker(arguments, env, os.environ if base is None else base, sock, output, imports)
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
                self._process = wrap_process(process)
        except BaseException:
            os.close(self._log)
            raise
        finally:
            os.close(output)
        os.set_blocking(self._log, False)
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._event_loop.watch(self._log, self._read_log)
            self._event_loop.watch(self._pidfd, self._on_exit)
        except BaseException:  # No descriptor is free, or the event loop is closed.
            self._process.kill()
            self._process.wait_for_exit()
            self._process = None
            self._event_loop.unwatch(self._log)
            self._close_descriptors()
            raise

    def kill(self) -> None:
        """Kill the process and all descendants, from any thread. Does nothing after the end of the process."""
        with self._lock, contextlib.suppress(OSError):  # The process has ended already.
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, ENDS)
                # A stopped supervisor must continue, to handle the signal.
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def reap(self) -> None:
        """Kill the process and wait for the exit, because the event loop has ended. Reports the exit as usual."""
        self.kill()
        if self._process is not None and not self.is_over:
            self._on_exit()

    def inspect(self, then: Callable[[str | None], None]) -> None:
        """Inspect the process from outside on a new thread, and call `then` with the result (see `Host.inspect`)."""

        def run() -> None:
            # This is imported late, because most keepers never inspect a worker.
            from colocate.keeper.outside import inspect_worker

            if not _inspections.acquire(timeout=LOOKED_AT_WITHIN_S):
                then(None)
                return
            try:
                then(inspect_worker(self.pid))
            finally:
                _inspections.release()

        try:
            Thread(target=run, name="colocate-look").start()
        except RuntimeError:  # No thread can be started.
            then(None)

    # -- on the event loop's thread

    def end_stray(self) -> None:
        """Kill a process that still runs after closing the lane. The exit report then names this reason."""
        self._is_astray |= self._process is not None and not self.is_over and not processes.has_worker_ended(self.pid)
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
            self._report_line(line)
        if b"\r" in rest:
            self._partial = trim_overwritten(rest)
            if time.monotonic() - self._bar_shown_at >= _BAR_EVERY_S:
                self._bar_shown_at = time.monotonic()
                self._report_line(rest, "\r")

    def _report_line(self, line: bytes, ends: str = "") -> None:
        self._events.on_line(get_last_state(line.decode(errors="replace")) + ends)

    def _on_exit(self) -> None:
        assert self._process is not None
        code = self._process.wait_for_exit()
        self._event_loop.unwatch(self._pidfd)
        with contextlib.suppress(BlockingIOError):  # A child of the worker may still hold the pipe open.
            # A child that has left the process group may write for ever, so the reads are limited.
            for _ in range(_LAST_READS):
                if not (data := os.read(self._log, 65536)):
                    break
                self._partial += data
        self._event_loop.unwatch(self._log)
        for line in self._partial.removesuffix(b"\n").split(b"\n") if self._partial else ():
            self._report_line(line)
        self._close_descriptors()
        if code == -ENDS:  # The worker was killed before the supervisors existed.
            code = -signal.SIGKILL
        name = signal.Signals(-code).name if code is not None and code < 0 else None
        why = (_NO_LANE if self._is_astray else self._oom_kills.describe_since()) if code == -signal.SIGKILL else None
        if why is None and code is None:
            why = _UNKNOWN
        self._events.on_exit(None if name is not None else code, name, why)

    def _close_descriptors(self) -> None:
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pidfd = -1
        os.close(self._log)
