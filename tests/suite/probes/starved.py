"""Blocks in which a process can start no thread or open no descriptor."""

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
    """Refuse new threads in this process, as at a limit of processes or of memory.

    Args:
        dies: Whether a thread starts and dies at once, instead of failing to start.
    """

    def refuse(*_: Any, **__: Any) -> int:
        if dies:
            return 0
        raise RuntimeError("can't start new thread")

    # The standard library starts threads by these functions, depending on its version.
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
    """Leave no descriptor free in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
