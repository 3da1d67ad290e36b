"""Ends a worker process.

The visible part of an interpreter's shutdown is done: threads are waited for, exit handlers run, objects that roles
held are finalized, and files are flushed. The rest, which takes all modules apart, is skipped: with torch that is half
a second of processor time, mostly for copies of pages that a fork shares with others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
from types import TracebackType
from typing import Any, NoReturn

from colocate._signals.in_framework import begin_users_code, end_users_code
from colocate.wire import track


def end_process(status: int = 0) -> NoReturn:
    """End this process with an exit code, as an interpreter does after a script."""
    threads: Any = threading
    handlers: Any = atexit
    threads._shutdown()
    handlers._run_exitfuncs()
    gc.collect()  # A fork's initial objects are frozen by the template, and aren't collected.
    for item in gc.get_objects():
        if issubclass(type(item), io.IOBase):
            # Errors are ignored, as an interpreter does: the file may be closed, or nobody reads the pipe.
            with contextlib.suppress(Exception):
                item.flush()
    ctypes.CDLL(None).fflush(None)  # This flushes output that C libraries have buffered.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # Nobody reads the stream, or a role has closed the stream.
            status = 120  # An interpreter uses this exit code in this case.
    os._exit(status & 0xFF)


class RoleCode:
    """A context manager around role code.

    A child forked inside exits at the end of the block, as a script's child would.
    """

    def __init__(self, has_thread: bool = True) -> None:
        """Args: has_thread: False on the main thread, and for code that is awaited."""
        self._is_parent = True
        self._has_thread = has_thread
        self._sections: list[int] = []
        track(self)

    def close_after_fork(self) -> None:
        """Record that this process is a forked child. Called in each fork; see `wire.track`."""
        self._is_parent = False

    def __enter__(self) -> None:
        if self._has_thread:
            self._sections.append(begin_users_code())

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._has_thread:
            end_users_code(self._sections.pop())
        if self._is_parent:
            return
        # Exit code and message are as for a script that ends by this exception.
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                end_process(int(error.code or 0))
            print(error.code, file=sys.stderr)
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        end_process(0 if error is None else 1)
