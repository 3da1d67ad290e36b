"""A worker at the end of its lane, or of several that follow each other: a detached pool changes its drivers.

While its keeper keeps the door open (a socket on which lanes come), the end of a lane isn't the worker's end: it drops
what the driver has asked for, and waits for the next. Without a door, the end of its lane is its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from colocate import wire
from colocate._protocol import from_worker, to_worker, versions
from colocate._protocol.message import Head, kind_of, read
from colocate._protocol.versions import base_of
from colocate._system.limits import STEP_ENDS_WITHIN_S
from colocate.executor import Boot
from colocate.worker.birth.supervisor import CLOSES_OTHERS
from colocate.worker.serving.host import WorkerHost

GIVEN_BYTES = 1 << 20
# What comes through the door in the place of a lane:
CUT = b"cut"  # the one that there is is over
LOOK = b"look "  # somebody asks what the worker does; the question's number follows, with which its answer begins

Start = Callable[[Boot, "Service", wire.SocketLane], WorkerHost]


def given(door: socket.socket) -> tuple[socket.socket, int, wire.Tls | None] | bytes:
    """Return what came through the door: a lane, its driver's epoch (0: the only one), this machine's certificates.

    Or, as bytes, what came in its place.

    Raises:
        EOFError: The keeper is gone, or has no use for a worker.
    """
    data, fds, _, _ = socket.recv_fds(door, GIVEN_BYTES, 1)
    if data == CUT or data.startswith(LOOK):
        return data
    if not fds:
        raise EOFError
    os.set_inheritable(fds[0], False)  # not by a flag: Python 3.11's recv_fds passes none on
    epoch, _, told = data.partition(b" ")
    sock, tls = wire.take_over(socket.socket(fileno=fds[0]), told)
    return sock, int(epoch), tls


class Service:
    """Serves one lane after the other. On the event loop's thread, unless said otherwise."""

    def __init__(
        self, event_loop: wire.EventLoop, start: Start, tls: wire.Tls | None, door: socket.socket | None
    ) -> None:
        """Serve none yet."""
        self.event_loop = event_loop
        self.tls = tls
        self._start = start
        self.door = door
        self._host: WorkerHost | None = None
        self._lane: wire.SocketLane | None = None
        self._epoch = 0
        self._heeds: bool | None = None  # whether its driver is of the same version; None before it has said so
        self._next: tuple[socket.socket, int] | None = None
        if door is not None:
            door.setblocking(False)
            event_loop.watch(door.fileno(), self._at_the_door)

    def open(self, sock: socket.socket, epoch: int) -> None:
        """Serve a connected, authenticated socket; the first message on it is the boot."""
        self._epoch, self._heeds = epoch, None
        if self._host is not None:
            self._renew(self._host, epoch)
        self._lane = self.event_loop.attach(sock, self._received, self._closed)
        if self._host is not None:
            self._host.lane.turn_to(self._lane)

    def say(self, head: tuple[Any, ...], body: Any) -> None:
        """Tell the driver something; from any thread. Nobody hears it while there is none."""
        if (lane := self._lane) is not None and not lane.send(head, body):
            self._look_after(lane)

    def drain(self, timeout: float) -> None:
        """Wait until what was said has gone out; not on the event loop's thread."""
        if (lane := self._lane) is not None:
            lane.drain(timeout)

    def _received(self, head: tuple[Any, ...], body: Any) -> None:
        if kind_of(head) != to_worker.Boot.__name__:
            if self._heeds is None:
                print(
                    f"the first message on this worker's lane is {kind_of(head)!r}; colocate {_boot().version} says "
                    "Boot first: the driver is of another version, or its executor doesn't send first_message(boot)",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            return
        self._heeds = read(head) == _boot()
        if not self._heeds:
            pass  # `hello` says of which version this is; nothing else of the driver's is read
        elif self._host is None:
            assert self._lane is not None
            self._host = self._start(wire.unpack(body), self, self._lane)
            if self._epoch > 1:  # the numbers that it is about to hear don't begin with 1
                self._host.renew(base_of(self._epoch))
        else:
            self._host.adopt(wire.unpack(body))
        if self._heeds and self._host is not None and self._lane is not None:
            self._lane.pass_to(self._host.receive, self._host.arrives)
        self.say(hello(), None)

    def _closed(self, reason: str) -> None:
        """The lane has ended. On the thread that was receiving."""
        host = self._host
        if host is not None and host.ended:
            return
        if self._lane is not None:
            self._look_after(self._lane)
        if self.door is None or host is None:
            # Without the driver nothing here has an owner; role code that still runs must not keep the process.
            if reason.startswith("the other side"):
                os._exit(0)
            print(f"the connection to the driver has ended here: {reason}", file=sys.stderr)
            os._exit(1)
        self.event_loop.later(0.0, partial(self._vacate, host))

    @staticmethod
    def _look_after(lane: wire.SocketLane) -> None:
        """End the process if the lane has ended because somebody here closed its descriptor."""
        if lane.taken:
            print(f"the connection to the driver was closed here: {CLOSES_OTHERS}", file=sys.stderr)
            os._exit(1)

    def _vacate(self, host: WorkerHost) -> None:
        self._lane = None
        self._renew(host, self._epoch + 1)
        self._open_next()

    def _renew(self, host: WorkerHost, epoch: int) -> None:
        """The driver before this epoch has let go."""
        base = base_of(epoch)
        host.renew(base)
        # By then what it had begun has had its time to end by itself: what still runs of it waits no longer.
        self.event_loop.later(
            STEP_ENDS_WITHIN_S,
            lambda: host.frees(lambda: any(0 < seq <= base for seq in list(host.lane.running))),
        )

    def _at_the_door(self) -> None:
        assert self.door is not None
        try:
            found = given(self.door)
        except BlockingIOError:
            return
        except (EOFError, OSError):  # without a keeper nothing here has an owner
            os._exit(0)
        if isinstance(found, bytes) and found != CUT:
            if self._host is not None:
                self._host.look(partial(self._answer, found.removeprefix(LOOK)))
            return
        if not isinstance(found, bytes):
            sock, epoch, _ = found
            if self._next is not None:
                self._next[0].close()
            self._next = sock, epoch
        if self._lane is not None:
            self._lane.close("another driver has it now")
        else:
            self._open_next()

    def _answer(self, number: bytes, seen: Mapping[str, Any]) -> None:
        """Through the door. On any thread."""
        assert self.door is not None
        with contextlib.suppress(OSError):  # the keeper is gone, or doesn't read
            self.door.send(number + b" " + json.dumps(seen).encode())

    def _open_next(self) -> None:
        if self._next is not None:
            (sock, epoch), self._next = self._next, None
            self.open(sock, epoch)


def first_message(boot: Boot) -> tuple[Head, wire.Packed]:
    """Return what a driver sends a worker before anything else."""
    return _boot().head(), wire.pack(boot)


def _boot() -> to_worker.Boot:
    here = versions.facts()
    return to_worker.Boot(here["protocol"], here["colocate"])


def hello() -> Head:
    """Return what a worker says of itself first."""
    return from_worker.Hello(versions.facts()).head()
