"""The standard library's TLS socket, as the wire uses it: from several threads, and perhaps without blocking."""

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
    """A connection with TLS on it. An end of it is an end of file, announced or not: who is killed announces nothing.

    Attributes:
        is_open: Whether TLS is set up, and the other side has proved the secret.
        has_more: Whether there is something to receive that the kernel knows nothing of.
        wants_write: Whether what was tried last waits for room in the socket, otherwise for what the other side says.
        to_say: What is left to say to prove a secret of both sides.
        to_hear: What the other side has yet to say for that.
    """

    CHUNK_BYTES = 1 << 17
    is_open = has_more = wants_write = False
    to_say = to_hear = b""
    _lock: threading.Lock

    def __new__(cls, *args: Any, **named: Any) -> Secured:
        """As `SSLSocket` is made, which has no place for more."""
        made = super().__new__(cls, *args, **named)
        made._lock = threading.Lock()  # one TLS mustn't be read and written at the same time
        return track_socket(made)

    def set_up(self) -> None:
        """Set TLS up, as far as that goes."""
        with self._locked():
            pass

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """See `socket`; of a connection that doesn't block, several records, but never more than `CHUNK_BYTES`."""
        view, filled = memoryview(buffer)[: self.CHUNK_BYTES], 0
        with self._locked():
            if begun := self.pending():  # the rest of a record, of which the kernel shows nothing
                view = view[:begun]
            try:
                while filled < len(view):
                    filled += (count := super().recv_into(view[filled:]))
                    if not count:  # raises where there is no end: somebody else has closed the descriptor
                        self.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
                    if not count or self.gettimeout() != 0:
                        break
            except ssl.SSLError:
                if not filled:  # otherwise what is wrong is found again
                    raise
            finally:
                self.has_more = self.pending() > 0
            return filled

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """See `socket`. With flags: of what is there encrypted."""
        if flags:
            return socket.socket.recv(self, buflen, flags)
        if getattr(self, "_sslobj", None) is None:  # `ssl` looks itself whether the peer has gone, before there is TLS
            try:
                return socket.socket.recv(self, buflen)
            except ConnectionError:
                self.close()  # nobody else has it yet
                raise
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])

    def send(self, data: Any, flags: int = 0) -> int:
        """See `socket`; after BlockingIOError it is to be called again with the same data, as OpenSSL has it."""
        with self._locked():
            return super().send(memoryview(data)[: self.CHUNK_BYTES])

    def shutdown(self, how: int) -> None:
        """See `socket`: who still reads finds the end, and nothing that is encrypted."""
        socket.socket.shutdown(self, how)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Go on setting TLS up first, and say what goes wrong as other sockets do."""
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
            super().send(self.to_say)  # so little that it is taken whole
            self.to_say = b""
        while self.to_hear:
            part = super().recv(len(self.to_hear))
            if not part or not hmac.compare_digest(part, self.to_hear[: len(part)]):
                raise ConnectionAbortedError(errno.ECONNABORTED, "the other side doesn't know the secret")
            self.to_hear = self.to_hear[len(part) :]
        self.is_open = True
