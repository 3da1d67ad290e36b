"""A moment in which a process has no thread, no descriptor or no memory to give; and a role that has such moments."""

from __future__ import annotations

import _thread
import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_threads(dies: bool = False) -> Iterator[None]:
    """No thread can be started in this process: as when the limit of processes or of memory is reached.

    Args:
        dies: Whether one is started, and finds no memory as it begins.
    """

    def refuse(*_: Any, **__: Any) -> int:
        if dies:
            return 0
        raise RuntimeError("can't start new thread")

    # By these the standard library starts them, in whatever version.
    names = {_thread: ("start_new_thread",), threading: ("_start_new_thread", "_start_joinable_thread")}
    were = [
        (module, name, getattr(module, name)) for module in names for name in names[module] if hasattr(module, name)
    ]
    for module, name, _ in were:
        setattr(module, name, refuse)
    try:
        yield
    finally:
        for module, name, was in were:
            setattr(module, name, was)


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """No descriptor is free in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
