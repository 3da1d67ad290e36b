"""A window into a running job, for the same user on the same machine: who looks changes nothing.

A socket without a file, whose name says the process and the job. Who connects is told what the groups do just then, as
one line of JSON, and nothing is read.
"""

from __future__ import annotations

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
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from colocate._api.glance import Recent, glance
from colocate._system.deadline import Deadline

if TYPE_CHECKING:
    from colocate._api.runtime import Runtime

_NAME = "colocate-job"
_PATIENCE_S = 5.0
_LONGEST = 64  # of a name: a socket's has a limit
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


class Window:
    """That of one job; a context manager that closes it."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._since = time.time()
        self._recent = Recent()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_address(Job(name, os.getpid(), next(_numbers))))
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve, name=f"colocate-window-{name}", daemon=True)

    def __enter__(self) -> Window:
        self._runtime.observe(self._recent)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # which ends the wait for the next one
        self._socket.close()
        self._runtime._node.services.observers.remove(self._recent)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # it was closed
                return
            with peer:
                try:
                    self._tell(peer)
                except OSError:  # who looked has gone
                    continue

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
    found: dict[str, Any] | None = json.loads(received) if received else None
    return found


def _address(job: Job) -> str:
    return f"\0{_NAME}/{job.pid}/{job.number}/{job.name[:_LONGEST]}"
