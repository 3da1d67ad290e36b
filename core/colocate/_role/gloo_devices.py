"""Gloo groups of one process on one device: what serves their connections, a thread."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

_WATCHED = re.compile(r"tfd:\s*(\d+) .* ino:([0-9a-f]+)")
_loops: set[int] = set()
_lock = threading.Lock()
_users = 0  # threads that make groups
_torchs: list[Any] = []  # torch's class, while there are any


@contextlib.contextmanager
def on_one_device(c10d: Any) -> Iterator[None]:
    """Have gloo groups share the thread that does what comes on their connections, which torch gives each of its own.

    Where processors are few, its waking up is what a collective mostly waits for: with a group for each of two models
    under FSDP2, whose collectives alternate, a step of training took 8 % longer (torch 2.13, two ranks on two cores).
    """
    # Torch passes no options on to gloo: so the class that it calls is another one meanwhile.
    global _users
    with _lock:
        _users += 1
        if _users == 1 and (gloo := getattr(c10d, "ProcessGroupGloo", None)) is not None:  # not in every torch
            _torchs.append(gloo)
            c10d.ProcessGroupGloo = _sharing()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _torchs:
                c10d.ProcessGroupGloo = _torchs.pop()


@functools.cache
def _sharing() -> Any:
    """Gloo's groups as torch's constructor makes them, but for their devices."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta, **more: Any) -> None:
            options = _options(gloo, timeout, more)
            if options is None:  # a torch that makes them in another way: they have threads of their own
                super().__init__(store, rank, size, timeout, **more)
            else:
                super().__init__(store, rank, size, options)

    return Sharing


def _options(gloo: Any, timeout: datetime.timedelta, more: dict[str, Any]) -> Any:
    """As torch's own constructor makes them of its arguments; None where that isn't known."""
    try:
        options = gloo._Options()
        options._timeout = timeout
        for name, value in more.items():  # from torch 2.14 on there is one
            if value != getattr(options, name):
                setattr(options, name, value)
        # Last: what else goes wrong leaves a group to devices of its own.
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 2 * len(options._devices)
    except AttributeError:
        return None
    return options


@functools.cache
def _devices(interfaces: str) -> list[Any]:
    """Those of this process. Each has a thread."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    before = _polls()
    if not interfaces:
        made = [gloo.create_default_device()]
    else:
        made = [gloo.create_device(interface=each) for each in interfaces.split(",")]
    _loops.update(_polls() - before)  # for good, as the devices are
    return made


def sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of each socket that gloo in this process waits for: its connections, and where it listens.

    A descriptor's number tells no socket from another: gloo closes those of an old group when it likes.
    """
    # What a process has connected besides, it knows nothing of: stores' clients, say, whose groups are cut some day.
    for loop in sorted(_loops) or _polls():
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/fdinfo/{loop}") as told:
            for line in told:
                if (found := _WATCHED.match(line)) is not None:
                    yield int(found[1]), int(found[2], 16)


def _polls() -> set[int]:
    """Descriptors of what this process waits for many of at once."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{entry}") == "anon_inode:[eventpoll]":
                found.add(int(entry))
    return found
