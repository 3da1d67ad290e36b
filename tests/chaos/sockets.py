"""Dropping connections from outside: a socket of any process of ours is duplicated, and shut down."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

from colocate import ColocatedGroup, Runtime

_PIDFD_GETFD = 438


class NoSuchSocket(Exception):
    """There is none to drop now."""


def drop(target: str, runtime: Runtime, group: ColocatedGroup, slot: int) -> None:
    """Shut down a connection of a slot.

    Args:
        target: "lane" (driver and worker), "keeper" (the commands to it), "envoy" (driver and envoy), "peer" (from
            worker to worker).
        runtime: Whose.
        group: Whose.
        slot: Which of its slots.

    Raises:
        NoSuchSocket: There is none.
    """
    if target == "peer":
        _drop_peer(group, slot)
        return
    owner: Any = group.workforce.workers[slot].host
    if target == "lane":
        lane = getattr(owner, "_lane", None)
        sock = None if lane is None else lane._sock
    elif target == "keeper":
        commands = owner.slot._commands if hasattr(owner, "slot") else None
        sock = None if commands is None else commands._sock
    else:
        executor: Any = runtime.executor
        sock = executor._envoy._sock
    if sock is None or sock.fileno() < 0:
        raise NoSuchSocket(target)
    shut(os.getpid(), sock.fileno())


def shut(pid: int, fd: int) -> None:
    """Shut down a socket of a process, as if the network had failed.

    Raises:
        NoSuchSocket: It is gone.
    """
    sock = _borrowed(pid, fd)
    if sock is None:
        raise NoSuchSocket(f"descriptor {fd} of process {pid}")
    with sock:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            raise NoSuchSocket(str(error)) from error


def _drop_peer(group: ColocatedGroup, slot: int) -> None:
    worker = group.workforce.workers[slot]
    lanes = _lane_addresses(worker.host)
    pid = worker.pid
    if pid is None:
        raise NoSuchSocket("its worker has no pid yet")
    found = False
    for sock in _sockets_of(pid):
        with sock:
            if _is_peer(sock, lanes):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # just gone
                    continue
                found = True
    if not found:
        raise NoSuchSocket("no worker has asked another")


def _is_peer(sock: socket.socket, lanes: set[Any]) -> bool:
    """A connection between two workers has an address on one of its ends; a worker's lane has its keeper's, or none."""
    if sock.family != socket.AF_UNIX or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    try:
        names = {sock.getsockname(), sock.getpeername()} - {"", b""}
    except OSError:  # not connected
        return False
    return bool(names) and not names & lanes


def _lane_addresses(host: Any) -> set[Any]:
    lane = getattr(host, "_lane", None)
    if lane is None or lane._sock.fileno() < 0:
        return set()
    return {lane._sock.getsockname(), lane._sock.getpeername()} - {"", b""}


def _sockets_of(pid: int) -> Iterator[socket.socket]:
    """Duplicates of all sockets of a process."""
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for entry in entries:
        try:
            if not os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                continue
        except OSError:  # closed meanwhile
            continue
        sock = _borrowed(pid, int(entry))
        if sock is not None:
            yield sock


def _borrowed(pid: int, fd: int) -> socket.socket | None:
    """A duplicate of another process's socket (or of our own), as a debugger may have it; None when it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, fd, 0)
    finally:
        os.close(handle)
    if own < 0:
        number = ctypes.get_errno()
        if number == errno.EPERM:
            raise PermissionError(f"process {pid} can't be looked into: the chaos suite needs ptrace rights on its own")
        return None
    try:
        return socket.socket(fileno=own)
    except OSError:  # no socket any more
        os.close(own)
        return None
