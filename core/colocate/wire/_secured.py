"""Adapt the standard library's TLS socket to the wire: use from several threads, and non-blocking."""

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
    """A TLS socket that treats any end of the connection as end of file: a killed peer announces nothing.

    Attributes:
        is_open: Whether the handshake is done, and the peer has proved the secret.
        has_more: Whether decrypted bytes are buffered, which the kernel doesn't report as readable.
        wants_write: Whether the last operation waits for room in the socket, instead of for data.
        to_say: The unsent rest of this side's proof of the secret.
        to_hear: The rest of the proof expected from the peer.
    """

    CHUNK_BYTES = 1 << 17
    is_open = has_more = wants_write = False
    to_say = to_hear = b""
    _lock: threading.Lock

    def __new__(cls, *args: Any, **named: Any) -> Secured:
        """Create a socket with a lock; the creation of an `SSLSocket` has no other place for attributes."""
        sock = super().__new__(cls, *args, **named)
        sock._lock = threading.Lock()  # OpenSSL must not read and write one connection at the same time
        return track_socket(sock)

    def set_up(self) -> None:
        """Advance the handshake as far as possible."""
        with self._locked():
            pass

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """See `socket`. On a non-blocking socket this reads several records, at most `CHUNK_BYTES`."""
        view, filled = memoryview(buffer)[: self.CHUNK_BYTES], 0
        with self._locked():
            if begun := self.pending():  # the rest of a record is buffered, invisible to the kernel
                view = view[:begun]
            try:
                while filled < len(view):
                    filled += (count := super().recv_into(view[filled:]))
                    if not count:  # raises if other code has closed the descriptor: that is no end of file
                        self.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
                    if not count or self.gettimeout() != 0:
                        break
            except ssl.SSLError:
                if not filled:  # otherwise the next call meets the same error
                    raise
            finally:
                self.has_more = self.pending() > 0
            return filled

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """See `socket`. With flags the encrypted bytes are read."""
        if flags:
            return socket.socket.recv(self, buflen, flags)
        # `ssl` reads before the handshake, to check whether the peer has gone.
        if getattr(self, "_sslobj", None) is None:
            try:
                return socket.socket.recv(self, buflen)
            except ConnectionError:
                self.close()  # the only reference to the socket
                raise
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])

    def send(self, data: Any, flags: int = 0) -> int:
        """See `socket`. After BlockingIOError call again with the same data, as OpenSSL requires."""
        with self._locked():
            return super().send(memoryview(data)[: self.CHUNK_BYTES])

    def shutdown(self, how: int) -> None:
        """See `socket`. Blocked readers see the end, and no TLS message is sent."""
        socket.socket.shutdown(self, how)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, advance the handshake first, and translate TLS errors to those of plain sockets."""
        with self._lock:
            try:
                if not self.is_open:
                    self._open()
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

    def _open(self) -> None:
        self.do_handshake()
        if self.to_say:
            super().send(self.to_say)  # short enough to be sent whole
            self.to_say = b""
        while self.to_hear:
            part = super().recv(len(self.to_hear))
            if not part or not hmac.compare_digest(part, self.to_hear[: len(part)]):
                raise ConnectionAbortedError(errno.ECONNABORTED, "the other side doesn't know the secret")
            self.to_hear = self.to_hear[len(part) :]
        self.is_open = True
