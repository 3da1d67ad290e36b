"""What workers print, on the driver's `sys.stderr`: by a thread of its own, so that nothing else waits for a reader."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from colocate._system.jobs import JobThread, error_text, report_exception
from colocate._system.limits import CONNECTING_S, PRINTED_WITHIN_S
from colocate._system.threads import Thread

_BUFFER_CHARS = 1 << 20  # what waits for a reader that is late; what comes beyond that is dropped
_CHUNK = 4096  # what a pipe takes whole when it says that it takes something (PIPE_BUF)
_LOOK_MS = 50


class Printer:
    """Prints lines in order. What isn't taken in time is dropped, and a line in its place says how much that was.

    All of a user's that is told something by the framework is told here: `sys.stderr`, which may be anything, and
    handlers of logs.
    """

    def __init__(self, name: str) -> None:
        self._jobs = JobThread(name, lambda error: report_exception())
        self.note = self._jobs.note
        self._lock = threading.Lock()  # nothing is printed while it is held
        self._lines: deque[str | int] = deque()  # a number stands for so many that were dropped
        self._waiting = 0  # characters
        self._dropping = False  # until there is room again, not for a line but for many
        self._dropped = 0
        self._why = ""
        self._given_up = False
        self._jobs.start()

    def line(self, text: str) -> None:
        """Print a line, some time soon. From any thread; never waits."""
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
            self._jobs.soon(self._print)

    def soon(self, job: Callable[[], object]) -> None:
        """Log something. From any thread; never waits."""
        self._jobs.soon(job)

    def close(self) -> None:
        """Print what is left, for a moment at most: what isn't taken by then is lost, and so is what comes later."""
        self._jobs.close(PRINTED_WITHIN_S)
        self._given_up = True  # the thread looks at this now and then, unless it is in a stream of the user's own

    # -- on the thread

    def _print(self) -> None:
        while not self._given_up and (lines := self._take()):
            try:
                _write("".join(f"{self._text(line)}\n" for line in lines), lambda: self._given_up)
            except (OSError, ValueError):  # the driver's own output is closed: nobody reads it
                pass
            except BaseException as error:  # it may be a stream of the user's, which raises what it likes
                with self._lock:
                    self._dropped += sum(line if isinstance(line, int) else 1 for line in lines)
                    self._why = f"sys.stderr raised {error_text(error)}"

    def _take(self) -> list[str | int]:
        """Return some lines, that make up a chunk."""
        found: list[str | int] = []
        size = 0
        with self._lock:
            if self._dropping and not self._lines:  # nothing may come any more
                self._dropping = False
                if self._dropped:
                    self._lines.append(self._dropped)
                    self._dropped = 0
            while self._lines and size < _CHUNK:
                line = self._lines.popleft()
                found.append(line)
                if isinstance(line, str):
                    size += len(line) + 1
                    self._waiting -= len(line)
        return found

    def _text(self, line: str | int) -> str:
        if isinstance(line, str):
            return line
        what = "1 line of workers' output was" if line == 1 else f"{line} lines of workers' output were"
        return f"[colocate] {what} dropped here: {self._why}"


@contextlib.contextmanager
def told_when_slow(what: str) -> Iterator[None]:
    """While the block runs, print what is done once that takes long, and again when it has taken twice as long."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = CONNECTING_S
        while not over.wait(wait):
            wait = time.monotonic() - began
            with contextlib.suppress(Exception):  # nobody reads it, or it is a stream of the user's
                _write(f"[colocate] {what}: {wait:.0f} s\n", over.is_set)

    thread = Thread(target=tell, name="colocate-start")
    with contextlib.suppress(RuntimeError):  # no thread is to be had: then nothing is told
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join(PRINTED_WITHIN_S)


def _write(text: str, given_up: Callable[[], bool]) -> None:
    """Write to `sys.stderr`. To the process's own by its descriptor, and only when that takes something.

    A thread that hangs in the stream itself would keep its lock, of which the interpreter would die at its exit.
    """
    stream = sys.stderr
    own = sys.__stderr__
    if own is None or stream is not own:
        if stream is not None:  # as in a process without a terminal
            stream.write(text)
            stream.flush()
        return
    data = memoryview(text.encode(own.encoding, "backslashreplace"))
    descriptor = own.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data:
        if poll.poll(_LOOK_MS):
            data = data[os.write(descriptor, data[:_CHUNK]) :]
        elif given_up():
            return
