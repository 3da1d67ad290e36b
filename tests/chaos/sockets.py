"""Dropping connections from outside: a socket of any process of ours is duplicated, and shut down."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
from collections.abc import Collection, Iterator
from typing import Any

from tests.chaos.programs import PEERS

from colocate import ColocatedGroup, Runtime
from colocate._worker_group.workforce import NOT_LAUNCHED

_PIDFD_GETFD = 438
_ACCEPTS = 0x10000  # the flag of a listening socket in /proc/net/unix


class NoSuchSocket(Exception):
    """There is none to drop now."""


def drop(target: str, runtime: Runtime, group: ColocatedGroup, slot: int) -> None:
    """Shut down a connection of a slot, or raise `NoSuchSocket`.

    "lane" is of driver and worker, "keeper" has the commands to it, "envoy" is of driver and envoy, "peer" from worker
    to worker, "peer listener" where the others reach a worker, "keeper listener" where drivers reach a keeper.
    """
    if target in PEERS:
        _drop_peer(group, slot, target == "peer listener")
        return
    owner: Any = group._node.workforce.workers[slot].host
    if owner is NOT_LAUNCHED:
        raise NoSuchSocket(target)
    if target == "keeper listener":
        _drop_listener(owner.slot.address)
        return
    if target == "lane":
        sock = None if owner.lane is None else owner.lane._sock
    elif target == "keeper":
        sock = None if owner.slot._commands is None else owner.slot._commands._sock
    else:
        executor: Any = runtime._node.services.executor
        sock = executor._envoy._lane._sock
    if sock is None or sock.fileno() < 0:
        raise NoSuchSocket(target)
    shut(os.getpid(), sock.fileno())


def shut(pid: int, fd: int) -> None:
    """Shut down a socket of a process, as if the network had failed."""
    sock = _borrowed(pid, fd)
    if sock is None:
        raise NoSuchSocket(f"descriptor {fd} of process {pid}")
    with sock:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            raise NoSuchSocket(str(error)) from error


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


def _drop_listener(address: str) -> None:
    """That of a Unix address, in whichever process it is."""
    kind, _, name = address.partition(",")[0].partition(":")
    assert kind == "unix"
    with open("/proc/net/unix") as table:  # Num RefCount Protocol Flags Type St Inode Path
        rows = [line.split() for line in table]
    inodes = {row[6] for row in rows if row[-1] == f"@{name}" and int(row[3], 16) & _ACCEPTS}
    for entry in os.listdir("/proc"):
        for sock in _sockets_of(int(entry), inodes) if entry.isdigit() else ():
            with sock:
                sock.shutdown(socket.SHUT_RDWR)
                return
    raise NoSuchSocket(address)


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_peer(sock: socket.socket, lanes: set[Any]) -> bool:
    """A connection between two workers has an address on one of its ends; a worker's lane has its keeper's, or none."""
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


def _sockets_of(pid: int, inodes: Collection[str] | None = None) -> Iterator[socket.socket]:
    """Duplicates of all sockets of a process, or of those with some inodes."""
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for entry in entries:
        try:
            inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}"))
            if inode is None or (inodes is not None and inode[1] not in inodes):
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
