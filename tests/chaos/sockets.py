"""Drop connections from outside: duplicate a socket of any process of ours, and shut down the duplicate."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

from tests.chaos.programs import PEERS

from colocate import ColocatedGroup, Runtime
from colocate._worker_group.workforce import NOT_LAUNCHED

_PIDFD_GETFD = 438


class NoSuchSocket(Exception):
    """There is no socket to drop now."""


def drop(target: str, runtime: Runtime, group: ColocatedGroup, slot: int) -> None:
    """Shut down a connection of a slot, or raise `NoSuchSocket`.

    "lane" connects driver and worker, "keeper" carries the keeper's commands, "envoy" connects driver and envoy, "peer"
    connects two workers, and "peer listener" accepts a worker's peers.
    """
    if target in PEERS:
        _drop_peer(group, slot, target == "peer listener")
        return
    owner: Any = group._node.workforce.workers[slot].host
    if owner is NOT_LAUNCHED:
        raise NoSuchSocket(target)
    if target == "lane":
        sock = None if owner.lane is None else owner.lane._sock
    elif target == "keeper":
        sock = None if owner.slot._commands is None else owner.slot._commands._sock
    else:
        executor: Any = runtime._node.services.executor
        sock = executor._envoy._lane._sock
    if sock is None:
        raise NoSuchSocket(target)
    try:
        with socket.socket(fileno=os.dup(sock.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # the socket is closed
        raise NoSuchSocket(target) from error


def _drop_peer(group: ColocatedGroup, slot: int, listening: bool) -> None:
    worker = group._node.workforce.workers[slot]
    pid = worker.pid
    if pid is None:
        raise NoSuchSocket("its worker has no pid yet")
    lanes = _lane_addresses(worker.host)
    found = False
    for sock in _sockets_of(pid):
        with sock:
            if sock.family == socket.AF_UNIX and (_listens(sock) if listening else _is_peer(sock, lanes)):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # just gone
                    continue
                found = True
    if not found:
        raise NoSuchSocket("no worker has asked another")


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_peer(sock: socket.socket, lanes: set[Any]) -> bool:
    """Return whether a socket connects two workers: one end has an address, and no end has the lane's."""
    if _listens(sock):
        return False
    try:
        names = {sock.getsockname(), sock.getpeername()} - {"", b""}
    except OSError:  # not connected
        return False
    return bool(names) and not names & lanes


def _lane_addresses(host: Any) -> set[Any]:
    lane = host.lane
    if lane is None or lane._sock.fileno() < 0:
        return set()
    return {lane._sock.getsockname(), lane._sock.getpeername()} - {"", b""}


def _sockets_of(pid: int) -> Iterator[socket.socket]:
    """Yield duplicates of all sockets of a process."""
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
    """Return a duplicate of any process's socket, with a debugger's rights; None if the socket is closed."""
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
    except OSError:  # the descriptor isn't a socket any more
        os.close(own)
        return None
