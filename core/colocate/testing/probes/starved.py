"""A moment in which a process has no thread, no descriptor or no memory to give; and a role that has such moments."""

from __future__ import annotations

import _thread
import contextlib
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from colocate import First, Role, method


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """No thread can be started in this process: as when the limit of processes or of memory is reached."""

    def refuse(*_: Any) -> NoReturn:
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


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """This process gets a MiB more of memory, and nothing larger."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    found = re.search(r"^VmSize:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    resource.setrlimit(resource.RLIMIT_AS, ((int(found[1]) + 1024) * 1024, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


LACKS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "threads": without_threads,
    "descriptors": without_descriptors,
    "memory": without_memory,
}


class Starved(Role):
    """Its process lacks something, as long as it is told to."""

    def __init__(self) -> None:
        self._lacking = contextlib.ExitStack()

    @method
    def lack(self, what: str) -> None:
        """Have nothing more of something, by its name in `LACKS`."""
        self._lacking.enter_context(LACKS[what]())

    @method
    def recover(self) -> None:
        """Have it again."""
        self._lacking.close()

    @method(collect=First())
    def text(self, length: int) -> bytes:
        """So many bytes."""
        return bytes(length)

    @method(collect=First())
    def length(self, text: bytes) -> int:
        """How long it is."""
        return len(text)
