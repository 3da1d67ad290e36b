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
from typing import Any, NoReturn


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
