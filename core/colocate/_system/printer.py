"""Print workers' output on the driver's `sys.stderr`, on a separate thread, so that a slow reader delays nothing."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from colocate._system.jobs import JobThread, format_error, report_exception
from colocate._system.limits import CONNECTING_S, PRINTED_WITHIN_S
from colocate._system.threads import Thread

_BUFFER_CHARS = 1 << 20  # At most this many characters wait for a slow reader; further lines are dropped.
_CHUNK = 4096  # A ready pipe accepts this many bytes without blocking (PIPE_BUF).
_LOOK_MS = 50


class Printer:
    """Prints lines in order. If the reader is too slow, lines are dropped, and a printed note counts the dropped lines.

    All messages of the framework to user code pass through here: to `sys.stderr`, which may be any object, and to
    handlers of logs.
    """

    def __init__(self, name: str) -> None:
        self._jobs = JobThread(name, lambda error: report_exception())
        self.enqueue = self._jobs.enqueue
        self._lock = threading.Lock()  # The lock protects the queue. No line is printed under this lock.
        self._lines: deque[str | int] = deque()  # A number in the queue stands for that many dropped lines.
        self._waiting = 0  # The queued lines have this many characters.
        self._dropping = False  # Whether to drop lines, until half of the buffer is free again.
        self._dropped = 0
        self._why = ""
        self._is_abandoned = False
        self._jobs.start()

    def print_line(self, text: str) -> None:
        """Queue a line for printing. Safe on any thread; never blocks."""
        with self._lock:
            self._dropping = self._waiting > (_BUFFER_CHARS // 2 if self._dropping else _BUFFER_CHARS)
            if self._dropping:
                self._dropped += 1
                self._why = "they weren't read fast enough"
                return
            idle = not self._lines
            if self._dropped:
                self._lines.append(self._dropped)
                self._dropped = 0
            self._lines.append(text)
            self._waiting += len(text)
        if idle:
            self._jobs.call_soon(self._print)

    def call_soon(self, job: Callable[[], object]) -> None:
        """Queue a log call. Safe on any thread; never blocks."""
        self._jobs.call_soon(job)

    def close(self) -> None:
        """Print the remaining lines within `PRINTED_WITHIN_S` seconds; drop the rest and all later lines."""
        self._jobs.close(PRINTED_WITHIN_S)
        self._is_abandoned = True  # The thread checks this flag regularly, unless a user's own stream blocks.

    # -- on the thread

    def _print(self) -> None:
        while not self._is_abandoned and (lines := self._take_lines()):
            try:
                _write_stderr("".join(f"{self._format_line(line)}\n" for line in lines), lambda: self._is_abandoned)
            except (OSError, ValueError):  # The driver's output is closed, so that nobody can read the lines.
                pass
            except BaseException as error:  # A user's stream may raise any exception.
                with self._lock:
                    self._dropped += sum(line if isinstance(line, int) else 1 for line in lines)
                    self._why = f"sys.stderr raised {format_error(error)}"

    def _take_lines(self) -> list[str | int]:
        lines: list[str | int] = []
        size = 0
        with self._lock:
            if self._dropping and not self._lines:  # Report dropped lines now, because no further line may come.
                self._dropping = False
                if self._dropped:
                    self._lines.append(self._dropped)
                    self._dropped = 0
            while self._lines and size < _CHUNK:
                line = self._lines.popleft()
                lines.append(line)
                if isinstance(line, str):
                    size += len(line) + 1
                    self._waiting -= len(line)
        return lines

    def _format_line(self, line: str | int) -> str:
        if isinstance(line, str):
            return line
        subject = "1 line of workers' output was" if line == 1 else f"{line} lines of workers' output were"
        return f"[colocate] {subject} dropped here: {self._why}"


@contextlib.contextmanager
def report_when_slow(what: str) -> Iterator[None]:
    """Print a message if the block takes long, and again each time that the duration has doubled."""
    end_event, began = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = CONNECTING_S
        while not end_event.wait(wait):
            wait = time.monotonic() - began
            with contextlib.suppress(Exception):  # The stream may be closed, or a user's stream may raise.
                _write_stderr(f"[colocate] {what}: {wait:.0f} s\n", end_event.is_set)

    thread = Thread(target=tell, name="colocate-start")
    with contextlib.suppress(RuntimeError):  # If no thread can start, no message is printed.
        thread.start()
    try:
        yield
    finally:
        end_event.set()
        if thread.ident is not None:
            thread.join(PRINTED_WITHIN_S)


def _write_stderr(text: str, given_up: Callable[[], bool]) -> None:
    """Write to `sys.stderr`. The process's own stderr is written by descriptor, and only while writable.

    A thread that blocks inside the stream would keep the stream's lock, and crash the interpreter at exit.
    """
    stream = sys.stderr
    process_stderr = sys.__stderr__
    if process_stderr is None or stream is not process_stderr:
        if stream is not None:  # In a process without a terminal the stream is None.
            stream.write(text)
            stream.flush()
        return
    data = memoryview(text.encode(process_stderr.encoding, "backslashreplace"))
    descriptor = process_stderr.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data:
        if poll.poll(_LOOK_MS):
            data = data[os.write(descriptor, data[:_CHUNK]) :]
        elif given_up():
            return
