"""Ends of connections, with the messages that they receive."""

from __future__ import annotations

import os
import queue
import socket
from typing import Any

from colocate.wire import EventLoop, Packed, SocketLane, Tls, unpack
from colocate.wire.framing import FILE_BYTES
from colocate.wire.tls import wrap_tls

WAIT_S = 20  # The limit for events that should come at once.
KINDS = ["unix", "tcp"]
LARGE = FILE_BYTES // 2  # int64 elements: travels as a file where it can


def left_behind() -> tuple[list[str], int]:
    """Return the open descriptors, and the number of mappings of message memory."""
    with open("/proc/self/maps") as maps:
        return sorted(os.listdir("/proc/self/fd")), maps.read().count("memfd:colocate")


def socket_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def tls_pair(tls: Tls, secrets: tuple[bytes, bytes] = (b"", b"")) -> tuple[socket.socket, socket.socket]:
    """Return two ends on which TLS isn't set up yet."""
    one, other = socket_pair("tcp")
    return (
        wrap_tls(one, tls.context(server=False), server=False, secret=secrets[0]),
        wrap_tls(other, tls.context(server=True), server=True, secret=secrets[1]),
    )


class End:
    """One end of a connection, with a queue of its messages and one of its ends."""

    def __init__(self, event_loop: EventLoop, sock: socket.socket) -> None:
        self.messages: queue.Queue[tuple[tuple[Any, ...], Packed | None]] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        self.lane: SocketLane = event_loop.attach(sock, self.on_message, self.ends.put)

    def on_message(self, head: tuple[Any, ...], body: Packed | None) -> None:
        self.messages.put((head, body))

    def get(self) -> tuple[tuple[Any, ...], Any]:
        head, body = self.messages.get(timeout=WAIT_S)
        return head, None if body is None else unpack(body)

    def end(self) -> str:
        return self.ends.get(timeout=WAIT_S)


def raising(*_: Any) -> None:
    raise KeyError("raised")
