"""The end of a worker's process, when its work is done.

What an interpreter does at its end that anybody can see is done: it waits for threads, calls exit handlers, finalizes
what roles held, and writes what files have yet to write. What it does besides, taking all modules apart, isn't: with
torch that is half a second of processor time, and most of it goes into copying pages that a fork shares with others.
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

from colocate._signals.in_framework import begin_users, end_users
from colocate.wire import track


def end(status: int = 0) -> NoReturn:
    """End this process, as well as an interpreter does whose script ends with such an exit code."""
    threads: Any = threading
    handlers: Any = atexit
    threads._shutdown()
    handlers._run_exitfuncs()
    gc.collect()  # not what a fork had from the beginning: the template has set that aside
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with contextlib.suppress(Exception):  # it is closed, or nobody reads it; an interpreter says nothing either
                each.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries have printed
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it, or a role has closed it
            status = 120  # an interpreter's
    os._exit(status & 0xFF)


class RoleCode:
    """A block of role code. A child that it forks ends there, as that of a script does, and not as the worker."""

    def __init__(self, has_thread: bool = True) -> None:
        """Args: has_thread: Whether nothing else comes on the lane until it ends, as while it awaits something."""
        self._is_left = True
        self._has_thread = has_thread
        self._begun: list[int] = []
        track(self)

    def forget(self) -> None:
        """Hear that this is a forked child."""
        self._is_left = False

    def __enter__(self) -> None:
        if self._has_thread:
            self._begun.append(begin_users())

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._has_thread:
            end_users(self._begun.pop())
        if self._is_left:
            return
        # By the exit code of a script that such an exception ends, which is told as there.
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                end(int(error.code or 0))
            print(error.code, file=sys.stderr)
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        end(0 if error is None else 1)
