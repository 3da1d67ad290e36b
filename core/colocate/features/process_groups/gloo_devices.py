"""Lets all gloo process groups of a process share one gloo device: a thread that serves the groups' connections."""

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
_devices: list[GlooDevice] = []  # Devices are never removed, like gloo's own devices.
_original_classes: list[
    Any
] = []  # Torch's class for gloo groups is stored here while another class replaces the original.
_thread_state = threading.local()  # The device that each thread uses at the moment.


@attrs.define(eq=False)
class GlooDevice:
    """A gloo device: a thread that serves connections of process groups. Reserved while a group is made with it."""

    is_taken: bool = False
    _gloos: dict[str, list[Any]] = attrs.field(factory=dict)  # The key is the text with the requested interfaces.
    _loops: set[int] = attrs.field(factory=set)

    def create_devices(self, interfaces: str) -> list[Any]:
        """Return gloo's device objects for the given network interfaces. Each object has a thread."""
        if interfaces not in self._gloos:
            with _lock:
                before = _find_loops()
                self._gloos[interfaces] = _create_gloos(interfaces)
                self._loops |= _find_loops() - before
        return self._gloos[interfaces]

    def list_sockets(self) -> Iterator[tuple[int, int]]:
        """Yield the descriptor and the inode of each socket of the device, including listeners.

        The inode is needed because gloo may close sockets of old groups at any time, and numbers are reused.
        """
        # Yield only this device's sockets, because other connections, for example to stores, must survive a cut.
        # If gloo has created a thread by itself, use all epoll descriptors of gloo.
        for loop in sorted(self._loops) or _find_loops():
            for fd, _, inode in _list_watched(loop):
                yield fd, inode


@contextlib.contextmanager
def share_device(c10d: Any) -> Iterator[GlooDevice]:
    """A context manager in which all gloo groups that the current thread creates share one device.

    Torch itself creates a device for each group. With few processors, a collective mostly waits until the device's
    thread wakes up. With separate devices for two models under FSDP2 with alternating collectives, a training step took
    8 % longer (torch 2.13, two ranks on two cores). Groups that are made at the same time get different devices, so
    that a connection's owner is known.
    """
    # Replace torch's class for gloo groups during the block, because torch passes no options to gloo.
    with _lock:
        device = next((candidate for candidate in _devices if not candidate.is_taken), None)
        if device is None:
            _devices.append(device := GlooDevice())
        device.is_taken = True
        # Some builds of torch have no gloo.
        if not _original_classes and (gloo := getattr(c10d, "ProcessGroupGloo", None)) is not None:
            _original_classes.append(gloo)
            c10d.ProcessGroupGloo = _make_sharing_class()
    outer, _thread_state.device = getattr(_thread_state, "device", None), device
    try:
        yield device
    finally:
        _thread_state.device = outer
        with _lock:
            device.is_taken = False
            if _original_classes and not any(candidate.is_taken for candidate in _devices):
                c10d.ProcessGroupGloo = _original_classes.pop()


@functools.cache
def _make_sharing_class() -> Any:
    """Return a class for gloo groups that works like torch's class but uses the current thread's device."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo

    class Sharing(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta, **more: Any) -> None:
            device: GlooDevice | None = getattr(_thread_state, "device", None)
            options = None
            # Set the same options as torch's constructor. If torch has changed, each group gets a separate device.
            with contextlib.suppress(AttributeError):
                gloo_options = gloo._Options()
                gloo_options._timeout = timeout
                for name, value in more.items():  # Since torch 2.14 there may be one more option.
                    if value != getattr(gloo_options, name):
                        setattr(gloo_options, name, value)
                if device is not None:  # This step is last: if an earlier step fails, the group gets a separate device.
                    gloo_options._devices = device.create_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
                    gloo_options._threads = 2 * len(gloo_options._devices)
                    options = gloo_options
            if options is None:
                super().__init__(store, rank, size, timeout, **more)
            else:
                super().__init__(store, rank, size, options)

    return Sharing


def _create_gloos(interfaces: str) -> list[Any]:
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    names = interfaces.split(",") if interfaces else []
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def _find_loops() -> set[int]:
    """Return the epoll descriptors of gloo's threads, or all epoll descriptors if gloo's can't be recognized.

    Children inherit gloo's epoll descriptors, and the user data of each watched file is a pointer. Other users, such as
    asyncio and libuv, store the number of the watched descriptor as user data. Role code may use these at any time.
    """
    polls: set[int] = set()
    gloos: set[int] = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The descriptor was closed in the meantime.
            if os.readlink(f"/proc/self/fd/{entry}") == "anon_inode:[eventpoll]":
                polls.add(int(entry))
    for poll in polls:
        flags, watched = _FLAGS.search(_read_fdinfo(poll)), _list_watched(poll)
        goes_on = flags is not None and not int(flags[1], 8) & os.O_CLOEXEC
        if goes_on and watched and all(data & 0xFFFFFFFF != fd for fd, data, _ in watched):
            gloos.add(poll)
    return gloos or polls


def _list_watched(poll: int) -> list[tuple[int, int, int]]:
    """Return the descriptor, the user data and the inode of each file that an epoll descriptor watches."""
    return [(int(fd), int(data, 16), int(inode, 16)) for fd, data, inode in _WATCHED.findall(_read_fdinfo(poll))]


def _read_fdinfo(poll: int) -> str:
    try:
        with open(f"/proc/self/fdinfo/{poll}") as file:
            return file.read()
    except FileNotFoundError:  # The descriptor was closed in the meantime.
        return ""
