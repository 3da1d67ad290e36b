"""What a connection to a keeper says first: what it is."""

from __future__ import annotations

import socket
from collections.abc import Callable

from colocate import wire

TOKEN_BYTES = 16
COMMANDS = bytes(TOKEN_BYTES)  # the token of the connection that carries the commands
NEWCOMER = b"\1" * TOKEN_BYTES  # that of one which would like to, or only asks


class Greeting:
    """A connection that has yet to say what it is."""

    def __init__(self, hub: wire.Hub, then: Callable[[bytes | None, socket.socket], None], sock: socket.socket) -> None:
        self._hub = hub
        self._then = then
        self._sock = sock
        self._token = b""
        hub.watch(sock.fileno(), self._read)
        self._read()  # through TLS it may have come already, which the kernel doesn't know

    def _read(self) -> None:
        try:
            part = self._sock.recv(TOKEN_BYTES - len(self._token))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._token += part
        if part and len(self._token) < TOKEN_BYTES:
            return
        self._hub.unwatch(self._sock.fileno())
        self._then(self._token if part else None, self._sock)
