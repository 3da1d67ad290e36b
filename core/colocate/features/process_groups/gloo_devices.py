"""One device for all gloo groups of a process: a thread that serves the groups' connections."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import attrs

_WATCHED = re.compile(r"^tfd:\s*(\d+) .* data:\s*([0-9a-f]+) .* ino:([0-9a-f]+)", re.MULTILINE)
_FLAGS = re.compile(r"^flags:\s*(\d+)$", re.MULTILINE)
_lock = threading.Lock()
_devices: list[Device] = []  # kept for good, like gloo's own
_torchs: list[Any] = []  # torch's class, while any device is taken
_own = threading.local()  # the device taken by each thread


@attrs.define(eq=False)
class Device:
    """A thread that serves connections of gloo groups, with epoll descriptors; taken while a group is made."""

    is_taken: bool = False
    _gloos: dict[str, list[Any]] = attrs.field(factory=dict)  # by requested interfaces
    _loops: set[int] = attrs.field(factory=set)

    def gloos(self, interfaces: str) -> list[Any]:
        """Return gloo's device objects. Each has a thread."""
        if interfaces not in self._gloos:
            with _lock:
                before = _gloos_loops()
                self._gloos[interfaces] = _made(interfaces)
                self._loops |= _gloos_loops() - before
        return self._gloos[interfaces]

    def sockets(self) -> Iterator[tuple[int, int]]:
        """Yield descriptor and inode of each socket of the device: connections and listeners.

        A descriptor's number doesn't identify a socket: gloo closes sockets of old groups at any time.
        """
        # Only this device's sockets: other connections, as of stores' clients, must survive a cut. If gloo has made a
        # thread by itself, all of the process's epoll descriptors count.
        for loop in sorted(self._loops) or _gloos_loops():
            for fd, _, inode in _watched(loop):
                yield fd, inode


@contextlib.contextmanager
def on_a_device(c10d: Any) -> Iterator[Device]:
    """Make gloo groups that the current thread creates in the block share one device; torch creates one per group.

    With few processors, a collective mostly waits for the wake-up of the device's thread: with a group for each of
    two models under FSDP2, with alternating collectives, a training step took 8 % longer (torch 2.13, two ranks on
    two cores). Groups that are made at the same moment get different devices, which tell the owner of a connection.
    """
    # Torch passes no options to gloo: another class replaces torch's meanwhile.
    with _lock:
        device = next((candidate for candidate in _devices if not candidate.is_taken), None)
        if device is None:
            _devices.append(device := Device())
        device.is_taken = True
        # Missing in some builds of torch.
        if not _torchs and (gloo := getattr(c10d, "ProcessGroupGloo", None)) is not None:
            _torchs.append(gloo)
            c10d.ProcessGroupGloo = _sharing()
    outer, _own.device = getattr(_own, "device", None), device
    try:
        yield device
    finally:
        _own.device = outer
        with _lock:
            device.is_taken = False
            if _torchs and not any(candidate.is_taken for candidate in _devices):
                c10d.ProcessGroupGloo = _torchs.pop()


@functools.cache
def _sharing() -> Any:
    """Return a class of gloo groups like torch's, but with the thread's device."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta, **more: Any) -> None:
            device: Device | None = getattr(_own, "device", None)
            options = None
            # Same options as in torch's own constructor; if torch has changed, groups get devices of their own.
            with contextlib.suppress(AttributeError):
                gloo_options = gloo._Options()
                gloo_options._timeout = timeout
                for name, value in more.items():  # one option from torch 2.14 on
                    if value != getattr(gloo_options, name):
                        setattr(gloo_options, name, value)
                if device is not None:  # last: if an earlier step fails, the group gets a device of its own
                    gloo_options._devices = device.gloos(os.environ.get("GLOO_SOCKET_IFNAME", ""))
                    gloo_options._threads = 2 * len(gloo_options._devices)
                    options = gloo_options
            if options is None:
                super().__init__(store, rank, size, timeout, **more)
            else:
                super().__init__(store, rank, size, options)

    return Sharing


def _made(interfaces: str) -> list[Any]:
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    names = interfaces.split(",") if interfaces else []
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def _gloos_loops() -> set[int]:
    """Return the epoll descriptors of gloo's threads; all of the process, if gloo's can't be told apart.

    Gloo's are inherited by children, and each watched descriptor carries a pointer; other users store the descriptor's
    number. asyncio and libuv do, and a role or a library may start to use them while gloo does.
    """
    polls: set[int] = set()
    gloos: set[int] = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{entry}") == "anon_inode:[eventpoll]":
                polls.add(int(entry))
    for poll in polls:
        flags, watched = _FLAGS.search(_told(poll)), _watched(poll)
        goes_on = flags is not None and not int(flags[1], 8) & os.O_CLOEXEC
        if goes_on and watched and all(data & 0xFFFFFFFF != fd for fd, data, _ in watched):
            gloos.add(poll)
    return gloos or polls


def _watched(poll: int) -> list[tuple[int, int, int]]:
    """Return descriptor, user data and inode of each watched file."""
    return [(int(fd), int(data, 16), int(inode, 16)) for fd, data, inode in _WATCHED.findall(_told(poll))]


def _told(poll: int) -> str:
    try:
        with open(f"/proc/self/fdinfo/{poll}") as file:
            return file.read()
    except FileNotFoundError:  # closed meanwhile
        return ""
