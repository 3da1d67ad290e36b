"""A window into a running job, for the same user on the same machine: who looks changes nothing.

A socket without a file, whose name says the process and the job. Who connects is told what the groups do just then, as
one line of JSON, and nothing is read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from colocate._api.glance import Recent, glance
from colocate._system.deadline import Deadline
from colocate._system.jobs import report_exception

if TYPE_CHECKING:
    from colocate._api.runtime import Runtime

_NAME = "colocate-job"
_PATIENCE_S = 5.0
_LONGEST = 64  # bytes of a name: a socket's has a limit
_STEP_S = 0.1
_CREDENTIALS = struct.Struct("3i")  # of a process: pid, user, group


_numbers = itertools.count(1)


class Job(NamedTuple):
    """A job that runs.

    Attributes:
        name: Its name.
        pid: Its driver's process.
        number: Which one it is there: a process may run several.
    """

    name: str
    pid: int
    number: int = 1


@contextlib.contextmanager
def window(runtime: Runtime, name: str) -> Iterator[None]:
    """A block in which a job can be looked at. Where that can't be, it goes on without."""
    try:
        found = _Window(runtime, name)
    except OSError:  # no descriptor is free, or another container of this network has one of that name
        yield
        return
    try:
        yield
    finally:
        found.close()


class _Window:
    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._since = time.time()
        self._process = os.getpid()
        self._closing = False
        self._recent = Recent()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_address(Job(_short(name), os.getpid(), next(_numbers))))
            self._socket.listen(8)
        except OSError:
            self._socket.close()
            raise
        runtime.observe(self._recent)
        self._thread = threading.Thread(target=self._serve, name=f"colocate-window-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody looks any more."""
        self._closing = True
        mine = os.getpid() == self._process  # a child's is the same one
        if mine:
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends the wait for the next one
        self._socket.close()
        if mine:
            self._thread.join(_STEP_S)  # as long as it waits there, the socket is listed
        self._runtime._node.services.observers.remove(self._recent)

    def _serve(self) -> None:
        while not self._closing:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # it was closed; or no descriptor is free just now
                if not self._closing:
                    time.sleep(_STEP_S)
                continue
            with peer:
                try:
                    self._tell(peer)
                except Exception as error:  # who looked has gone, say: whatever it is, the job has no part in it
                    if not isinstance(error, OSError):
                        report_exception()

    def _tell(self, peer: socket.socket) -> None:
        peer.settimeout(_PATIENCE_S)
        _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user not in (os.getuid(), 0):
            return
        groups = glance(self._runtime._node, self._recent) if self._runtime.alive else []
        seconds = round(time.time() - self._since, 3)
        told = {"job": self._name, "pid": os.getpid(), "seconds": seconds, "groups": groups}
        peer.sendall(json.dumps(told).encode() + b"\n")


def jobs() -> list[Job]:
    """The jobs that run on this machine, of whichever user."""
    return sorted(_listed(Path("/proc/net/unix").read_text(errors="replace")))


def _listed(sockets: str) -> Iterator[Job]:
    for found in re.finditer(rf"^\S+ \S+ \S+ 00010000 .* @{_NAME}/(\d+)/(\d+)/([\w.-]+)$", sockets, re.MULTILINE):
        yield Job(found[3], int(found[1]), int(found[2]))


def look(job: Job) -> dict[str, Any] | None:
    """What a job's groups do just now; None where it has ended, or is another user's.

    Raises:
        TimeoutError: It doesn't answer.
    """
    deadline, received = Deadline(_PATIENCE_S), b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.settimeout(_PATIENCE_S)
            peer.connect(_address(job))
            while chunk := peer.recv(1 << 16):
                received += chunk
                peer.settimeout(max(0.01, deadline.left or 0.01))
        except TimeoutError:
            raise TimeoutError(
                f"job {job.name!r} (process {job.pid}) doesn't answer: it is stopped, or hangs"
            ) from None
        except OSError:
            return None
    try:
        found: dict[str, Any] = json.loads(received)
    except ValueError:  # it has ended in the middle of it, or has said nothing
        return None
    return found


def _short(name: str) -> str:
    return name.encode()[:_LONGEST].decode(errors="ignore")


def _address(job: Job) -> str:
    return f"\0{_NAME}/{job.pid}/{job.number}/{job.name}"
