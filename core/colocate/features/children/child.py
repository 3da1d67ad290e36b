"""`Child`: the handle by which role code controls a process that the role has started."""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import re
import resource
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from colocate._system.ends import keep_exit_codes, wait_for_exit
from colocate._system.jobs import format_error
from colocate._system.limits import (
    CHILD_CODE_WITHIN_S,
    CHILD_ENDS_WITHIN_S,
    CHILD_STACK_WITHIN_S,
    CHILD_TOLD_WITHIN_S,
)
from colocate._system.numbers import parse_limit, parse_seconds
from colocate._system.threads import Thread
from colocate.errors import ChildDied, ColocateError
from colocate.wire import EventLoop

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

Fails: TypeAlias = Literal["call", "group"] | None
Ready: TypeAlias = "str | re.Pattern[str] | Callable[[Child], object]"
Health: TypeAlias = "str | Callable[[Child], object]"

_TAIL_LINES = 60  # This many lines hold the thread stacks of a hung child.
_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 12
_TAIL_LENGTH = 1 << 14
_MOST_READS = 16
_POLL_S, _ANSWER_TIMEOUT_S = 0.02, 2.0
_HEALTH_INTERVAL_S, _LONG_HEALTH_INTERVAL_S = 0.02, 5.0  # The shortest and longest time between two health checks.


class Parent(NamedTuple):
    """The identity of the role that started a child process: group, role, rank and node."""

    group: str
    role: str
    rank: int
    node: str


class Child:
    """A process that a role has started by `ctx.start`. All processes that the child starts end with the child.

    Attributes:
        name: The name, unique within the role on this worker.
        pid: The process id.
        port: The port on 127.0.0.1; None if no port was requested.
        managed: Bytes of host memory that the role's own `managed()` reports, and that count only there.
        connection: The role's end of the connection to a child that runs a function; None for a command. Each end can
            send any value; with torch also tensors, without a copy.
    """

    _colocate_barren = True  # A child refers to all roles, so the scan of a role's memory stops here.

    def __init__(
        self,
        parent: Parent,
        name: str,
        fails: Fails,
        row: Any,
        loop: EventLoop,
        asks: int,
        ends: int,
        on_line: Callable[[Child, str], None],
        on_change: Callable[[Child], None],
    ) -> None:
        self.name = name
        self.pid = 0
        self.port: int | None = None
        self.connection: Connection | None = None
        self.managed = 0
        self._parent = parent
        self._failure_scope = fails
        self._row = row  # The `RowState` of the row that started the child; None outside rows.
        self._ended_at = 0.0  # The time of the child's end, in seconds of `time.time()`.
        self._notified_at = -math.inf  # When a running call last got this child's `ChildDied`, by `time.monotonic()`.
        self._loop, self._on_line, self._on_change = loop, on_line, on_change
        # `asks` is the signal to the child, `ends` the signal to the upper supervisor.
        self._stop_signal, self._supervisor_signal = (
            asks,
            ends,
        )
        self._popen: subprocess.Popen[bytes] | None = None  # The process of the upper supervisor.
        self._port_socket: socket.socket | None = None  # This socket reserves the port until the child uses the port.
        # File descriptors of the child, of the upper supervisor, and of the pipe with the child's output.
        self._pidfd = self._tree_pidfd = self._output = -1
        self._exitcode: int | None = None  # As in `subprocess`, a negative number means a signal.
        self._is_ready = False
        self._expected = self._is_dead = False
        self._waiter_count = 0  # The number of threads that are in `wait`.
        self._cause = ""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial_line = b""
        self._line: re.Pattern[str] | None = None
        self._line_seen = threading.Event()
        self._ended = threading.Event()  # Set when the child itself has ended.
        self._tree_ended = threading.Event()  # Set when the child and all its descendants have ended.
        self._healthy_at = 0.0

    # -- for role code

    @property
    def alive(self) -> bool:
        """Whether the child process is running."""
        return not self._is_dead

    @property
    def _has_failed(self) -> bool:
        """Whether the child has ended although nobody called `stop` or `wait`."""
        return self._is_dead and not (self._expected or self._waiter_count)

    @property
    def exitcode(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the child; None while running or if unknown."""
        return self._exitcode

    @property
    def output(self) -> str:
        """The last lines that the child has printed."""
        return "\n".join(list(self._tail))[-_TAIL_LENGTH:]

    @property
    def state(self) -> str:
        """The state: "starting", "running", or the way the child ended."""
        if self.alive:
            return "running" if self._is_ready else "starting"
        return self._describe_exit()

    def stop(self, grace: float = 5.0) -> None:
        """End the child and all processes that the child has started. A repeated call has no effect.

        A child that ends by `stop` has not failed.

        Args:
            grace: Seconds from SIGTERM to SIGKILL.
        """
        grace = parse_seconds(grace, "child.stop: grace")
        self._expected = True
        if self.alive:
            self._cause = "stopped"
        self._on_change(self)
        if self._popen is None:  # The thread that is starting the child checks this flag.
            self._is_dead = True
        elif not self._tree_ended.is_set():
            self._send_signal(self._stop_signal)
            self._ended.wait(grace)
            self._end_tree()
        if self.connection is not None:
            self.connection.close()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the child has ended by itself, and return the exit code. An awaited end is no failure.

        Args:
            timeout: Seconds, at most; None for no limit.

        Raises:
            TimeoutError: The child still runs.
        """
        timeout = parse_limit(timeout, "child.wait: timeout")
        self._waiter_count += 1
        self._on_change(self)
        try:
            if not self._tree_ended.wait(timeout):
                raise TimeoutError(f"{self._label()} hasn't ended within {timeout} s")
            self._expected = True
        finally:
            self._waiter_count -= 1
            self._on_change(self)
        return self._exitcode

    def abort(self, why: str) -> None:
        """End a hung child by SIGABRT, so that a Python program prints the stacks of all threads.

        Returns at once. The child's end raises `ChildDied`, which contains the stacks.

        Args:
            why: The reason for the error text, such as "hung: ...".
        """
        self._cause = why
        with contextlib.suppress(OSError):
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGABRT, signal.SIGCONT):  # A stopped process handles SIGABRT only after SIGCONT.
            self._send_signal(number)
        self._loop.call_later(CHILD_STACK_WITHIN_S, lambda: self._send_signal(signal.SIGKILL))

    def __repr__(self) -> str:
        return f"<child {self.name!r} of role {self._parent.role!r}, pid {self.pid}: {self.state}>"

    # -- its life

    def _start(
        self,
        launcher: Sequence[str],
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        fds: Sequence[int],
    ) -> None:
        """Start the process on the event loop's thread, because the child ends with the thread that starts the child.

        Call this on another thread, because it waits for the event loop.

        Raises:
            ColocateError: The process can't be started.
        """
        import subprocess  # Imported on first use, because few workers have children.

        keep_exit_codes()
        read_end, tell = os.pipe()
        try:
            output, printed = os.pipe()
        except OSError:
            os.close(read_end)
            os.close(tell)
            raise
        outcome: list[BaseException | None] = []
        done = threading.Event()

        def start() -> None:
            try:
                self._popen = subprocess.Popen(
                    [*launcher, str(os.getpid()), str(tell), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    env=dict(env),
                    cwd=cwd,
                    pass_fds=[tell, *fds],
                )
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)
            done.set()

        self._loop.call_later(0.0, start)
        done.wait()
        os.close(tell)
        os.close(printed)
        with open(read_end, "rb") as file:
            pid, _, trouble = file.read().decode().partition(" ")
        self._output = output
        if self._popen is None or trouble or not pid:
            self._expected = self._is_dead = True
            self._tree_ended.set()
            if self._popen is not None:
                self._popen.wait()
            with open(output, "rb") as file:
                bytes_read = file.read(_READ_BYTES)
            why = format_error(outcome[0]) if outcome[0] is not None else trouble or bytes_read.decode(errors="replace")
            raise ColocateError(f"{self._label()} could not be started: {words[0]!r}: {why}")
        self.pid = int(pid)
        os.set_blocking(output, False)
        self._tree_pidfd = os.pidfd_open(self._popen.pid)  # The pid is valid, because the process wasn't reaped yet.
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # The child has already ended.
            self._pidfd = -1
        self._loop.watch(output, self._read_output)
        if self._pidfd >= 0:
            self._loop.watch(self._pidfd, self._on_exit)
        self._loop.watch(self._tree_pidfd, self._on_tree_exit)

    def _wait_ready(self, ready: Ready | None, within: float, given_up: Callable[[], bool]) -> None:
        """Wait until the child meets the criterion `ready`.

        Args:
            ready: The criterion: a compiled pattern for output lines, a URL, or a function of the child.
            within: Seconds, at most.
            given_up: Returns whether the call that started the child was cancelled.

        Raises:
            ChildDied: The child has ended, or was ended because it wasn't ready in time.
        """
        until = time.monotonic() + within
        check = _ReadyCheck(self, ready) if callable(ready) else None
        last = "it wasn't asked yet" if check is None else check.last
        while ready is not None and not self._expected:
            if not self.alive:
                raise self._exit_error()
            if given_up() or time.monotonic() > until:
                why = f"nobody waited any more until it was ready ({last})" if given_up() else ""
                self._cause = why or f"wasn't ready within {within:g} s ({last}), and was ended"
                self._end_tree()
                raise self._exit_error()
            if isinstance(ready, re.Pattern):
                last = f"no line like {ready.pattern!r}"
                if self._line_seen.wait(_POLL_S):
                    break
            elif check is not None:
                last = check.last
                if check.wait_answer(_POLL_S):
                    break
            elif isinstance(ready, str):
                answer = probe_url(ready)
                last = f"{ready}: {answer}"
                if answer == "200":
                    break
                self._ended.wait(_POLL_S)
        if self._expected:  # Another thread has stopped the child.
            self._end_tree()
            raise self._exit_error()
        self._is_ready = True

    def _set_ready_line(self, ready: Ready | None) -> Ready | None:
        """Set the pattern to search for in the child's output, and return `ready`, with text turned into a pattern."""
        if isinstance(ready, str) and not is_url(ready):
            ready = re.compile(re.escape(ready))
        self._line = ready if isinstance(ready, re.Pattern) else None
        return ready

    def _watch_health(self, health: Health, hung_after: float) -> None:
        self._healthy_at = looked = time.monotonic()
        every = max(_HEALTH_INTERVAL_S, min(hung_after / 4, _LONG_HEALTH_INTERVAL_S))

        def ask() -> None:
            while not self._ended.wait(every):
                try:
                    well = probe_url(health) == "200" if isinstance(health, str) else health(self)
                except Exception as error:
                    self._on_line(self, f"health={health!r} has raised {format_error(error)}")
                    well = False
                if well:
                    self._healthy_at = time.monotonic()

        def judge() -> None:
            nonlocal looked
            now = time.monotonic()
            if now - looked > 2 * every:  # This process was stopped or blocked, so no check could run.
                self._healthy_at = now
            looked = now
            if self.alive and not (self._expected or self._waiter_count):
                if now - self._healthy_at > hung_after:
                    self.abort(f"hung: its health was not good for {hung_after:g} s, so it was ended")
                else:
                    self._loop.call_later(every, judge)

        # The check may be role code that hangs, so the event loop's thread must not run the check.
        Thread(target=ask, name=f"child-{self.name}-health").start()
        self._loop.call_later(every, judge)

    def _await_exit(self, within: float, signs: bool = False) -> None:
        """Wait up to `within` seconds for the notification of the child's end, if there are signs of an end."""
        if self.alive and (signs or self._is_ending):
            self._ended.wait(max(0.0, within))

    @property
    def _is_ending(self) -> bool:
        """Whether the child's process or connection has ended, even if the notification hasn't arrived yet."""
        poll = select.poll()
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        if self.connection is not None:
            with contextlib.suppress(OSError):  # The connection may be closed on this side.
                poll.register(self.connection.fileno(), 0)
        return bool(poll.poll(0))

    @property
    def _root_pid(self) -> int:
        """The pid of the upper supervisor, an ancestor of all the child's processes; 0 before the start."""
        return 0 if self._popen is None else self._popen.pid

    def _explain_error(self, error: Exception) -> Exception:
        """Return the error to raise for a broken connection: `ChildDied` if the child has died, else `error`."""
        self._await_exit(CHILD_TOLD_WITHIN_S, signs=True)
        if not self._has_failed:
            return error
        self._notified_at = time.monotonic()
        return self._exit_error()

    def _release_port(self) -> None:
        if self._port_socket is not None:
            self._port_socket.close()

    def _kill(self) -> None:
        self._expected = True
        self._signal_tree()

    def _exit_error(self) -> ChildDied:
        code = self._exitcode
        return ChildDied(
            f"{self._label()} {self._describe_exit()}",
            name=self.name,
            **self._parent._asdict(),
            pid=self.pid,
            exitcode=code if code is not None and code >= 0 else None,
            signal=_signal_name(-code) if code is not None and code < 0 else None,
            log_tail=self.output or None,
        )

    def _label(self) -> str:
        group, role, rank, node = self._parent
        pid = f"pid {self.pid}, " if self.pid else ""
        return f"child {self.name!r} of role {role!r} on rank {rank} of group {group!r} ({pid}node {node})"

    def _describe_exit(self) -> str:
        if self._cause:
            return self._cause
        if self._exitcode is None:
            return "has ended"
        return (
            f"exited with code {self._exitcode}"
            if self._exitcode >= 0
            else f"was killed by {_signal_name(-self._exitcode)}"
        )

    def _send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, OSError):  # The process may have ended.
            if self._pidfd >= 0 and self.alive:
                signal.pidfd_send_signal(self._pidfd, number)

    def _signal_tree(self) -> None:
        if self._popen is not None:
            self._popen.send_signal(self._supervisor_signal)

    def _end_tree(self) -> None:
        self._signal_tree()
        if not self._tree_ended.wait(CHILD_ENDS_WITHIN_S):
            raise ColocateError(f"{self._label()} was killed, and is still there after {CHILD_ENDS_WITHIN_S:g} s")

    # -- on the event loop's thread

    def _read_output(self) -> bool:
        """Read some of the child's output, and return whether there may be more."""
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.unwatch(self._output)
        *whole, self._partial_line = (self._partial_line + data).split(b"\n")
        if self._partial_line and (not data or len(self._partial_line) > _LONGEST_LINE):
            whole.append(self._partial_line)
            self._partial_line = b""
        pieces = (range(0, max(1, len(line)), _LONGEST_LINE) for line in whole)
        lines = [line[at : at + _LONGEST_LINE] for line, piece in zip(whole, pieces, strict=True) for at in piece]
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self._tail.append(text)
            if self._line is not None and self._line.search(text):
                self._line_seen.set()
            self._on_line(self, text)
        return bool(data)

    def _on_exit(self) -> None:
        """Schedule the report of the child's end. The exit code is known once all its descendants have ended."""
        self._loop.unwatch(self._pidfd)
        self._loop.call_later(CHILD_CODE_WITHIN_S, self._finish)

    def _on_tree_exit(self) -> None:
        self._loop.unwatch(self._tree_pidfd)
        assert self._popen is not None
        code = self._popen.returncode  # A thread that sent a signal may have reaped the process.
        self._exitcode = wait_for_exit(self._popen.pid) if code is None else code
        self._popen.returncode = self._exitcode or 0
        self._finish()
        for fd in (self._output, self._pidfd, self._tree_pidfd):
            if fd >= 0:
                self._loop.unwatch(fd)
                os.close(fd)
        self._tree_ended.set()

    def _finish(self) -> None:
        if self._is_dead:
            return
        for _ in range(_MOST_READS):  # Limit the reads, because the child's descendants may go on printing.
            if not self._read_output():
                break
        self._is_dead, self._ended_at = True, time.time()
        self._on_change(self)
        self._ended.set()


class _ReadyCheck:
    """A separate thread that calls a `ready` function, which may block.

    Attributes:
        last: A description of the function's last answer, for error texts.
    """

    def __init__(self, child: Child, ready: Callable[[Child], object]) -> None:
        self._child, self._ready = child, ready
        self._answer: BaseException | bool = False
        self._is_over = threading.Event()
        self._name = getattr(ready, "__qualname__", repr(ready))
        self.last = f"ready={self._name} hasn't returned"
        context = contextvars.copy_context()
        Thread(target=context.run, args=(self._run,), name=f"child-{child.name}-ready").start()

    def _run(self) -> None:
        try:
            while not self._ready(self._child):
                self.last = f"ready={self._name} says no"
                if self._child._ended.wait(_POLL_S):
                    return
            self._answer = True
        except BaseException as error:  # The caller of `wait_answer` gets any error of the role's function.
            self._answer = error
        finally:
            self._is_over.set()

    def wait_answer(self, within: float) -> bool:
        """Wait up to `within` seconds, and return whether the function has returned true.

        Raises:
            BaseException: The function's error; ChildDied if the child's end is the cause.
        """
        if not self._is_over.wait(within):
            return False
        if isinstance(self._answer, BaseException):
            self._child._await_exit(CHILD_TOLD_WITHIN_S, signs=isinstance(self._answer, OSError | EOFError))
            if not self._child.alive:
                raise self._child._exit_error() from self._answer
            raise self._answer
        return self._answer


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_url(what: object) -> bool:
    """Return whether a value is an HTTP URL."""
    return isinstance(what, str) and what.startswith(("http://", "https://"))


def probe_url(url: str) -> str:
    """Return the HTTP status of a GET request as text, or an error text if the request fails."""
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection: Any = connection_class(parts.hostname or "", parts.port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}")
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return format_error(error)
    finally:
        connection.close()
