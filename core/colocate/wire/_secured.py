"""Adapt the standard library's TLS socket to the wire, for use by several threads and without blocking."""

from __future__ import annotations

import errno
import hmac
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from colocate.wire._forks import track_socket


class Secured(ssl.SSLSocket):
    """A TLS socket that treats any end of the connection as end of file, because a killed peer sends no TLS close.

    Attributes:
        is_open: Whether the handshake is done, and the peer has proved the secret.
        has_more: Whether decrypted bytes are buffered, which the kernel doesn't report as readable.
        wants_write: Whether the last operation waits for room in the socket, instead of for data.
        unsent_proof: The unsent rest of this side's proof of the secret.
        expected_proof: The rest of the proof expected from the peer.
    """

    CHUNK_BYTES = 1 << 17
    is_open = has_more = wants_write = False
    unsent_proof = expected_proof = b""
    _lock: threading.Lock

    def __new__(cls, *args: Any, **named: Any) -> Secured:
        """Create a socket with a lock. `SSLSocket` has no other method in which attributes can be set early enough."""
        sock = super().__new__(cls, *args, **named)
        sock._lock = threading.Lock()  # OpenSSL must not read and write one connection at the same time.
        return track_socket(sock)

    def set_up(self) -> None:
        """Advance the TLS handshake as far as possible."""
        with self._locked():
            pass

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive into a buffer like `socket.recv_into`. A non-blocking socket reads several records at once."""
        view, filled = memoryview(buffer)[: self.CHUNK_BYTES], 0
        with self._locked():
            if begun := self.pending():  # OpenSSL has buffered the rest of a record.
                view = view[:begun]
            try:
                while filled < len(view):
                    filled += (count := super().recv_into(view[filled:]))
                    if not count:
                        # This raises an error if the descriptor was closed.
                        self.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
                    if not count or self.gettimeout() != 0:
                        break
            except ssl.SSLError:
                if not filled:  # If bytes were received, the next call raises the same error.
                    raise
            finally:
                self.has_more = self.pending() > 0
            return filled

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive bytes, like `socket.recv`. With flags, the encrypted bytes are read."""
        if flags:
            return socket.socket.recv(self, buflen, flags)
        # Before the handshake, `ssl` calls this method to check whether the peer has closed.
        if getattr(self, "_sslobj", None) is None:
            try:
                return socket.socket.recv(self, buflen)
            except ConnectionError:
                self.close()  # Close here, because no other code refers to the socket.
                raise
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])

    def send(self, data: Any, flags: int = 0) -> int:
        """Send bytes, like `socket.send`. After BlockingIOError, OpenSSL requires another call with the same data."""
        with self._locked():
            return super().send(memoryview(data)[: self.CHUNK_BYTES])

    def shutdown(self, how: int) -> None:
        """Shut the connection down, like `socket.shutdown`. Blocked readers wake, and no TLS message is sent."""
        socket.socket.shutdown(self, how)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, advance the handshake before the block, and translate TLS errors to plain sockets' errors."""
        with self._lock:
            try:
                if not self.is_open:
                    self._handshake()
                yield
            except ssl.SSLWantReadError:
                self.wants_write = False
                raise BlockingIOError(errno.EAGAIN, "nothing has come") from None
            except ssl.SSLWantWriteError:
                self.wants_write = True
                raise BlockingIOError(errno.EAGAIN, "there is no room") from None
            except ssl.SSLEOFError as error:
                raise ConnectionResetError(errno.ECONNRESET, "the other side closed") from error
            except ssl.SSLError as error:
                raise ConnectionAbortedError(errno.ECONNABORTED, f"TLS: {error}") from error
            self.wants_write = False

    def _handshake(self) -> None:
        self.do_handshake()
        if self.unsent_proof:
            super().send(self.unsent_proof)  # The proof is short enough to be sent in one piece.
            self.unsent_proof = b""
        while self.expected_proof:
            part = super().recv(len(self.expected_proof))
            if not part or not hmac.compare_digest(part, self.expected_proof[: len(part)]):
                raise ConnectionAbortedError(errno.ECONNABORTED, "the other side doesn't know the secret")
            self.expected_proof = self.expected_proof[len(part) :]
        self.is_open = True
