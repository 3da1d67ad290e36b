"""Gloo groups of one process on one device: a thread that serves their connections."""

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
_devices: list[Device] = []  # for good, as gloo's are
_torchs: list[Any] = []  # torch's class, while any of them is taken
_own = threading.local()  # the device that a thread has taken


@attrs.define(eq=False)
class Device:
    """What serves the connections of gloo groups, and the descriptors that it waits by; taken while a group is made."""

    is_taken: bool = False
    _gloos: dict[str, list[Any]] = attrs.field(factory=dict)  # by the interfaces asked for
    _loops: set[int] = attrs.field(factory=set)

    def gloos(self, interfaces: str) -> list[Any]:
        """Return gloo's objects. Each has a thread."""
        if interfaces not in self._gloos:
            with _lock:
                before = _gloos_loops()
                self._gloos[interfaces] = _made(interfaces)
                self._loops |= _gloos_loops() - before
        return self._gloos[interfaces]

    def sockets(self) -> Iterator[tuple[int, int]]:
        """Give descriptor and inode of each socket that it waits for: its connections, and where it listens.

        A descriptor's number tells no socket from another: gloo closes those of an old group when it likes.
        """
        # What a process has connected besides, it knows nothing of: stores' clients, say, whose groups are cut some
        # day. All of the process's where gloo has made a thread by itself.
        for loop in sorted(self._loops) or _gloos_loops():
            for fd, _, inode in _watched(loop):
                yield fd, inode


@contextlib.contextmanager
def on_a_device(c10d: Any) -> Iterator[Device]:
    """Have the gloo groups that a thread makes share what does what comes on their connections, which torch gives each.

    Where processors are few, that thread's waking up is what a collective mostly waits for: with a group for each of
    two models under FSDP2, whose collectives alternate, a step of training took 8 % longer (torch 2.13, two ranks on
    two cores). Groups that are made at the same moment have different ones: whose a connection is shows by that.
    """
    # Torch passes no options on to gloo: so the class that it calls is another one meanwhile.
    with _lock:
        device = next((each for each in _devices if not each.is_taken), None)
        if device is None:
            _devices.append(device := Device())
        device.is_taken = True
        if not _torchs and (gloo := getattr(c10d, "ProcessGroupGloo", None)) is not None:  # not in every torch
            _torchs.append(gloo)
            c10d.ProcessGroupGloo = _sharing()
    outer, _own.device = getattr(_own, "device", None), device
    try:
        yield device
    finally:
        _own.device = outer
        with _lock:
            device.is_taken = False
            if _torchs and not any(each.is_taken for each in _devices):
                c10d.ProcessGroupGloo = _torchs.pop()


@functools.cache
def _sharing() -> Any:
    """Gloo's groups as torch's constructor makes them, but for their devices."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta, **more: Any) -> None:
            device: Device | None = getattr(_own, "device", None)
            options = None
            # As torch's own constructor makes them; where torch has another way, groups have threads of their own.
            with contextlib.suppress(AttributeError):
                made = gloo._Options()
                made._timeout = timeout
                for name, value in more.items():  # from torch 2.14 on there is one
                    if value != getattr(made, name):
                        setattr(made, name, value)
                if device is not None:  # last: what else goes wrong leaves a group to devices of its own
                    made._devices = device.gloos(os.environ.get("GLOO_SOCKET_IFNAME", ""))
                    made._threads = 2 * len(made._devices)
                    options = made
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
    """Return descriptors of those that gloo's threads wait by, as far as it can be told: else of all in this process.

    Gloo's go on in children, and each descriptor goes with a pointer: others keep a descriptor's number there. So do
    asyncio and libuv, by which a role or a library may begin to wait at the moment at which gloo does.
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
    """Return descriptor, what goes with it, and inode, of each that is waited for."""
    return [(int(fd), int(data, 16), int(inode, 16)) for fd, data, inode in _WATCHED.findall(_told(poll))]


def _told(poll: int) -> str:
    try:
        with open(f"/proc/self/fdinfo/{poll}") as told:
            return told.read()
    except FileNotFoundError:  # closed meanwhile
        return ""
