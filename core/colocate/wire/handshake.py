"""How two processes prove to each other that they know one key; and the listener's side of that, without blocking.

The dialler knocks, at once: a nonce, and an HMAC-SHA256 of that. Who knocks like this has known the key, or has heard
somebody who does; a listener that is flooded keeps its connection, and turns away others. Then each side proves
itself, the listener first, by an HMAC over its name and both nonces, so that no proof can be replayed or reflected. All
messages have a fixed size; no byte of a stranger is ever unpickled.

Where connections are encrypted it is the same twice: the dialler knocks in the open, TLS follows for those who have,
and all of it comes again inside, end to end.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import time
from typing import TYPE_CHECKING

from colocate.wire.tls import Secured, tune_tcp

if TYPE_CHECKING:
    import ssl  # at run time it is imported where it is used: most workers never need it

KEY_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING = b"colocate-wire-2\n"
TURNED_AWAY = b"colocate-busy-2\n"
KNOCK_BYTES = NONCE_BYTES + PROOF_BYTES
_BUFFER_BYTES = 1 << 20


def proof(key: bytes, side: bytes, nonces: bytes | bytearray) -> bytes:
    """What shows that a side knows the key."""
    return hmac.digest(key, side + b"\0" + nonces, "sha256")


def check_key(key: bytes) -> None:
    """Refuse what `new_key` hasn't made."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this one {len(key)}: use colocate.wire.new_key()")


def tune(sock: socket.socket) -> None:
    """Buffers and flags for messages: a small one goes out at once, a burst of them fits."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    else:
        tune_tcp(sock)


class Handshake:
    """The listener's side of one connection's authentication.

    Attributes:
        sock: The connection.
        since: When it came, in monotonic time.
        knocked: Whether who dials has shown that it knew the key.
        waits_for: What has to come before `advance` can go on, as epoll names it.
    """

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        check_key(key)
        self.sock = sock
        self._key = key
        self._nonces = secrets.token_bytes(NONCE_BYTES)
        self._heard = bytearray()
        self.since = time.monotonic()
        self.knocked = False
        self.waits_for = select.EPOLLIN
        tune(sock)

    def advance(self) -> bool:
        """Read what has come.

        Returns:
            Whether the other side is authenticated (`sock` is ready for messages).

        Raises:
            BlockingIOError: Nothing has come.
            OSError: The other side has gone or doesn't know the key: close the socket.
        """
        if not self.knocked:
            self._hear_knock()
            return False
        if not self._hear(PROOF_BYTES):
            return False
        if not hmac.compare_digest(self._heard, proof(self._key, b"dialler", self._nonces)):
            raise ConnectionRefusedError("the other side doesn't know the key")
        return True

    def turn_away(self) -> None:
        """Say that there was no room for it. It is to be closed then."""
        with contextlib.suppress(OSError):  # it has gone already
            self._say(TURNED_AWAY)

    def _hear_knock(self) -> None:
        if not self._hear(KNOCK_BYTES):
            return
        nonce, knock = bytes(self._heard[:NONCE_BYTES]), self._heard[NONCE_BYTES:]
        if not hmac.compare_digest(knock, proof(self._key, b"knock", nonce)):
            raise ConnectionRefusedError("the other side doesn't know the key")
        self.knocked = True
        self._heard.clear()
        self._answer(nonce)

    def _answer(self, nonce: bytes) -> None:
        own = self._nonces
        self._nonces = own + nonce
        self._say(GREETING + own + proof(self._key, b"listener", self._nonces))

    def _hear(self, count: int) -> bool:
        """Whether so many bytes have come. Never one more: what follows the proof belongs to the messages."""
        data = self._read(count - len(self._heard))
        if not data:
            raise ConnectionAbortedError("closed before it was authenticated")
        self._heard += data
        return len(self._heard) == count

    def _read(self, count: int) -> bytes:
        return self.sock.recv(count)

    def _say(self, data: bytes) -> None:
        self.sock.sendall(data)


class SecureHandshake(Handshake):
    """A knock in the open, then TLS, then a handshake as any other inside."""

    def __init__(self, sock: socket.socket, key: bytes, context: ssl.SSLContext) -> None:
        super().__init__(sock, key)
        self.sock = self._secured = Secured(sock, context, server=True)
        self._inside: Handshake | None = None

    def advance(self) -> bool:
        """See `Handshake`."""
        if not self.knocked:
            self._hear_knock()
            return False
        self._inside = self._inside or Handshake(self._secured, self._key)
        try:
            while not self._inside.advance():  # what has been decrypted shows to no epoll
                pass
        except BlockingIOError:
            self.waits_for = select.EPOLLOUT if self._secured.unsent else select.EPOLLIN
            raise
        return True

    def _answer(self, nonce: bytes) -> None:
        self._say(GREETING)

    def _read(self, count: int) -> bytes:
        return socket.socket.recv(self._secured, count)  # as it came

    def _say(self, data: bytes) -> None:
        socket.socket.send(self._secured, data)
