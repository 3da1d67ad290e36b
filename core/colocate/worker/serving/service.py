"""Serves a worker's drivers one after another, because a detached pool can change drivers.

A keeper may hold a door open: a socket through which it passes new lanes, which are connections to drivers. With a
door, a worker outlives the end of a lane: it drops the driver's calls, and waits for the next lane. Without a door, the
worker ends with its lane.
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
from colocate._protocol.message import Head, decode_head, kind_of
from colocate._protocol.versions import epoch_base
from colocate._system.limits import STEP_ENDS_WITHIN_S
from colocate.executor import Boot
from colocate.worker.birth.supervisor import CLOSES_OTHERS
from colocate.worker.serving.host import WorkerHost

HANDOVER_BYTES = 1 << 20
# With the messages CUT and LOOK, the keeper passes no connection to a driver.
CUT = b"cut"  # Message that the present connection to a driver has ended.
LOOK = b"look "  # Question for the worker's status. The answer begins with the number that follows here.

Start = Callable[[Boot, "Service", wire.SocketLane], WorkerHost]


def receive_lane(door: socket.socket) -> tuple[socket.socket, int, wire.Tls | None] | bytes:
    """Receive a driver's connection from the keeper's socket `door`, with its epoch and this machine's certificates.

    The epoch is 0 for the only driver. Other messages are returned as bytes.

    Raises:
        EOFError: The keeper has exited, or doesn't need the worker.
    """
    data, fds, _, _ = socket.recv_fds(door, HANDOVER_BYTES, 1)
    if data == CUT or data.startswith(LOOK):
        return data
    if not fds:
        raise EOFError
    os.set_inheritable(fds[0], False)  # The flag is set here, because Python 3.11's `recv_fds` ignores flags.
    epoch, _, certificates = data.partition(b" ")
    sock, tls = wire.take_over(socket.socket(fileno=fds[0]), certificates)
    return sock, int(epoch), tls


class Service:
    """Serves one driver after another. Methods run on the event loop's thread, unless documented otherwise."""

    def __init__(
        self, event_loop: wire.EventLoop, start: Start, tls: wire.Tls | None, door: socket.socket | None
    ) -> None:
        self.event_loop = event_loop
        self.tls = tls
        self._start = start
        self.door = door
        self._host: WorkerHost | None = None
        self._lane: wire.SocketLane | None = None
        self._epoch = 0
        # Whether the driver has the worker's version of colocate; None before the first message.
        self._is_same_version: bool | None = None
        self._next: tuple[socket.socket, int] | None = None
        if door is not None:
            door.setblocking(False)
            event_loop.watch(door.fileno(), self._on_door_event)

    def open(self, sock: socket.socket, epoch: int) -> None:
        """Serve a connected, authenticated socket. The first message must be the boot message."""
        self._epoch, self._is_same_version = epoch, None
        if self._host is not None:
            self._forget_driver(self._host, epoch)
        self._lane = self.event_loop.attach(sock, self._on_message, self._on_lane_closed)
        if self._host is not None:
            self._host.lane.use_lane(self._lane)

    def send_message(self, head: tuple[Any, ...], body: Any) -> None:
        """Send the driver a message, or drop the message if there is no driver. May be called from any thread."""
        if (lane := self._lane) is not None and not lane.send(head, body):
            self._check_descriptor(lane)

    def drain(self, timeout: float) -> None:
        """Wait until all sent messages are written. Must not run on the event loop's thread."""
        if (lane := self._lane) is not None:
            lane.drain(timeout)

    def _on_message(self, head: tuple[Any, ...], body: Any) -> None:
        if kind_of(head) != to_worker.Boot.__name__:
            if self._is_same_version is None:
                print(
                    f"the first message on this worker's lane is {kind_of(head)!r}; colocate "
                    f"{_create_boot().version} says "
                    "Boot first: the driver is of another version, or its executor doesn't send first_message(boot)",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            return
        self._is_same_version = decode_head(head) == _create_boot()
        if not self._is_same_version:
            pass  # The hello tells the driver this worker's version. All other messages are ignored.
        elif self._host is None:
            assert self._lane is not None
            self._host = self._start(wire.unpack(body), self, self._lane)
            if self._epoch > 1:  # The call numbers of later drivers don't begin with 1.
                self._host.forget_driver(epoch_base(self._epoch))
        else:
            self._host.change_driver(wire.unpack(body))
        if self._is_same_version and self._host is not None and self._lane is not None:
            self._lane.redirect_messages(self._host.receive, self._host.open_buffer)
        self.send_message(create_hello(), None)

    def _on_lane_closed(self, reason: str) -> None:
        """Handle the end of the connection to the driver. Runs on the receiving thread."""
        host = self._host
        if host is not None and host.has_ended:
            return
        if self._lane is not None:
            self._check_descriptor(self._lane)
        if self.door is None or host is None:
            # Without a driver, nobody owns this worker, so the process exits even if role code runs.
            if reason.startswith("the other side"):
                os._exit(0)
            print(f"the connection to the driver has ended here: {reason}", file=sys.stderr)
            os._exit(1)
        self.event_loop.call_later(0.0, partial(self._expire_driver, host))

    @staticmethod
    def _check_descriptor(lane: wire.SocketLane) -> None:
        """Exit if the connection has ended because code in this process has closed the descriptor."""
        if lane.is_closed_elsewhere:
            print(f"the connection to the driver was closed here: {CLOSES_OTHERS}", file=sys.stderr)
            os._exit(1)

    def _expire_driver(self, host: WorkerHost) -> None:
        self._lane = None
        self._forget_driver(host, self._epoch + 1)
        self._open_next()

    def _forget_driver(self, host: WorkerHost, epoch: int) -> None:
        """End the work for drivers before this epoch."""
        base = epoch_base(epoch)
        host.forget_driver(base)
        # Work of the former driver that is still running after this time is unblocked.
        self.event_loop.call_later(
            STEP_ENDS_WITHIN_S,
            lambda: host.unblock_lane(lambda: any(0 < seq <= base for seq in list(host.lane.running))),
        )

    def _on_door_event(self) -> None:
        assert self.door is not None
        try:
            handover = receive_lane(self.door)
        except BlockingIOError:
            return
        except (EOFError, OSError):  # Without a keeper, nobody owns this worker.
            os._exit(0)
        if isinstance(handover, bytes) and handover != CUT:
            if self._host is not None:
                self._host.send_snapshot(partial(self._send_answer, handover.removeprefix(LOOK)))
            return
        if not isinstance(handover, bytes):
            sock, epoch, _ = handover
            if self._next is not None:
                self._next[0].close()
            self._next = sock, epoch
        if self._lane is not None:
            self._lane.close("another driver has it now")
        else:
            self._open_next()

    def _send_answer(self, number: bytes, seen: Mapping[str, Any]) -> None:
        """Send the worker's status to the keeper. May run on any thread."""
        assert self.door is not None
        with contextlib.suppress(OSError):  # The keeper has exited, or doesn't read.
            self.door.send(number + b" " + json.dumps(seen).encode())

    def _open_next(self) -> None:
        if self._next is not None:
            (sock, epoch), self._next = self._next, None
            self.open(sock, epoch)


def first_message(boot: Boot) -> tuple[Head, wire.Packed]:
    """Return a driver's first message to a worker."""
    return _create_boot().head(), wire.pack(boot)


def _create_boot() -> to_worker.Boot:
    facts = versions.own_facts()
    return to_worker.Boot(facts["protocol"], facts["colocate"])


def create_hello() -> Head:
    """Return a worker's first message to a driver."""
    return from_worker.Hello(versions.own_facts()).head()
