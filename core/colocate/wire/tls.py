"""TLS: a socket that encrypts what goes through it, for connections between machines.

Lanes and peer channels use it as any other socket. Who may talk is decided twice: by certificates of one authority, as
in the cluster, and by the key inside, end to end. Used where the engine's own connections are encrypted.
"""

from __future__ import annotations

import errno
import functools
import hmac
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import attrs

from colocate.wire._forks import track_socket

if TYPE_CHECKING:
    import ssl  # at run time it is imported where it is used: most workers never need it

_NO_TLS = b"-"
_CHUNK_BYTES = 1 << 17
CUT_AFTER_S = 8.0
"""A connection to a machine that is gone without a word is taken for cut after so long, unless somebody says more."""
_PROBES = 3


@attrs.frozen
class Tls:
    """What one side of a cluster proves itself with, as PEM text.

    Attributes:
        authority: The certificates of the authority that has signed those of all sides.
        certificate: This side's.
        key: Its private key.
    """

    authority: str
    certificate: str
    key: str = attrs.field(repr=False)

    def context(self, server: bool) -> ssl.SSLContext:
        """What connections are made with. Names aren't checked: the authority signs for the cluster alone."""
        return _context(self, server)


@functools.lru_cache(maxsize=4)  # a process has those of one side, and reading them takes 2 ms
def _context(tls: Tls, server: bool) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_RENEGOTIATION  # sending never waits for something to be received
    if server:  # nobody resumes; and tickets, which hold certificates, may leave no room for what follows
        context.num_tickets = 0
    context.load_verify_locations(cadata=tls.authority)
    memory = os.memfd_create("colocate-tls", os.MFD_CLOEXEC)  # it is loaded from a path, and from nothing else
    try:
        os.write(memory, f"{tls.certificate}\n{tls.key}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


class Secured(socket.socket):
    """A connection with TLS on it: what is sent and received is the plain bytes. It blocks as the socket under it does.

    TLS is set up by whatever is received; nothing goes out before. An end of the connection is an end of file,
    announced or not: a process that is killed announces nothing, and messages show whether they are complete.

    Attributes:
        context: What it is made with.
        is_open: Whether TLS is set up, and the other side has proved the secret.
        has_more: Whether there may be something to receive that the kernel knows nothing of.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server: bool, heard: bytes = b"", secret: bytes = b""
    ) -> None:
        """Take a connection over.

        Args:
            sock: The connection; it is detached.
            context: `Tls.context`.
            server: The side of this one.
            heard: What has already been received of TLS.
            secret: What both sides prove to know, first of all, if anything; for this one connection.
        """
        import ssl

        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server)
        self.context = context
        self._incoming.write(heard)
        self._error, self._wants = ssl.SSLError, ssl.SSLWantReadError
        self._unsent = memoryview(b"")  # encrypted
        self._owed = 0  # how much of what is to be sent that is, with what is in `_outgoing`
        self._ended = False
        self._shaken = False
        self._to_prove = _proof(secret, not server) if secret else b""
        self._to_hear = _proof(secret, server) if secret else b""
        self.is_open = False
        self.has_more = True
        self._lock = threading.Lock()  # one TLS mustn't be read and written at the same time
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.settimeout(timeout)
        track_socket(self)

    @property
    def unsent(self) -> bool:
        """Whether something encrypted waits for room in the socket."""
        return bool(self._unsent)

    def sends(self, wanted: bool) -> bool:
        """Whether something would go out if there were room for it, given whether something is to be sent."""
        return bool(self._unsent) or (wanted and self.is_open)

    def set_up(self, deadline: float) -> None:
        """Set TLS up on a connection that blocks.

        Raises:
            OSError: It is nobody of the cluster, or late.
        """
        while True:
            with self._lock:
                self._open()
            if self.is_open:
                return
            if self._ended:
                raise ConnectionAbortedError("it closed the connection")
            self.settimeout(max(deadline - time.monotonic(), 0.001))
            self._hear()

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """See `socket`; all that has come, if there is room for it."""
        while True:
            with self._lock:
                if (count := self._decrypt(buffer) if self.has_more else 0) or self._ended:
                    return count
                self._flush_some()
            self._hear()

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """See `socket`. With flags: of what is there encrypted."""
        if flags:
            return super().recv(bufsize, flags)
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(memoryview(data))])

    def send(self, data: Any, flags: int = 0) -> int:
        """See `socket`; after BlockingIOError it is to be called again with the same data, as OpenSSL has it."""
        with self._lock:
            self._open()
            if not self.is_open:
                raise BlockingIOError(errno.EAGAIN, "TLS isn't set up yet")
            self._flush()
            if not self._owed:
                self._owed = self._encrypt(memoryview(data)[:_CHUNK_BYTES])
                self._flush()
            count, self._owed = self._owed, 0
            return count

    def send_file(self, file: int, offset: int, count: int) -> int:
        """See `os.sendfile`, and `send`."""
        return self.send(b"" if self._owed else os.pread(file, min(count, _CHUNK_BYTES), offset))

    def sendall(self, data: Any, flags: int = 0) -> None:
        """See `socket`, once TLS is set up; what the socket has no room for goes out with what is done next."""
        with self._lock:
            self._encrypt(data)
            self._flush_some()

    def flush(self) -> None:
        """Send what is encrypted; BlockingIOError when the socket has no room for it."""
        with self._lock:
            self._flush()

    def leave(self) -> bytes:
        """Use this TLS no more. What has been received after it, of what is next on the connection."""
        return self._incoming.read()

    def _hear(self) -> None:
        """Receive once."""
        data = super().recv(_CHUNK_BYTES)
        with self._lock:
            self._incoming.write(data)
            self._ended = not data
            self.has_more = True

    # With the lock held:

    def _open(self) -> None:
        """Go on setting TLS up, with what has come."""
        if self.is_open:
            return
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
                self._encrypt(self._to_prove)
            while self._to_hear:
                part = self._tls.read(len(self._to_hear))
                if not part:
                    self._ended = True
                    return
                if not hmac.compare_digest(part, self._to_hear[: len(part)]):
                    raise ConnectionAbortedError(errno.ECONNABORTED, "the other side doesn't know the secret")
                self._to_hear = self._to_hear[len(part) :]
            self.is_open = True
        except self._wants:
            self.has_more = False
        except self._error as error:
            raise _aborted(error) from error
        finally:
            self._flush_some()  # what the other side has done wrong is among it

    def _decrypt(self, buffer: Any) -> int:
        """Decrypt what has come, as far as there is room for it."""
        self._open()
        view, filled = memoryview(buffer), 0
        try:
            while self.is_open and filled < len(view):
                count = cast(int, self._tls.read(len(view) - filled, view[filled:]))
                filled += count
                if not count:
                    self._ended = True
                if not count or not (self._tls.pending() or self._incoming.pending):
                    self.has_more = False
                    break
        except self._wants:
            self.has_more = False
        except self._error as error:
            if not filled:  # otherwise it is found again
                raise _aborted(error) from error
        return filled

    def _encrypt(self, data: Any) -> int:
        if not len(data):
            return 0
        try:
            return self._tls.write(data)
        except self._error as error:
            raise _aborted(error) from error

    def _flush(self) -> None:
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            self._unsent = self._unsent[super().send(self._unsent) :]

    def _flush_some(self) -> None:
        try:
            self._flush()
        except OSError:  # no room; or the connection is broken, which shows when all that came before has been received
            pass


def send_file(sock: socket.socket, file: int, offset: int, count: int) -> int:
    """See `os.sendfile`; through TLS if there is one."""
    if isinstance(sock, Secured):
        return sock.send_file(file, offset, count)
    return os.sendfile(sock.fileno(), file, offset, count)


def secure(sock: socket.socket, tls: Tls, where: str, deadline: float) -> Secured:
    """Make a dialled connection an encrypted one, and prove both sides by their certificates; it is owned from now on.

    Args:
        sock: The connection, which blocks.
        tls: This side's certificates.
        where: What the error calls it.
        deadline: When it has to be done, in monotonic time.

    Raises:
        ConnectionRefusedError: It is nobody of the cluster.
    """
    try:
        sock = secured = Secured(sock, tls.context(server=False), server=False)
        secured.set_up(deadline)
        return secured
    # A listener that refuses our certificate says so only after that, when something is read.
    except (OSError, ValueError) as error:
        sock.close()
        raise ConnectionRefusedError(f"{where} isn't trusted, or doesn't trust this side: {error}") from error


def anew(sock: socket.socket, secret: bytes) -> socket.socket:
    """Begin TLS anew on a dialled connection that is handed on at its other end: to who knows a secret of both sides.

    Returns:
        What leads there, without waiting for it. A connection without TLS is the same as before.
    """
    return Secured(sock, sock.context, server=False, secret=secret) if isinstance(sock, Secured) else sock


def hand_on(sock: socket.socket, tls: Tls | None, secret: bytes) -> bytes:
    """What the process that is handed a connection is told of it: the certificates, and how TLS begins anew on it."""
    import json

    if tls is None:
        return _NO_TLS
    heard = sock.leave().hex() if isinstance(sock, Secured) else None
    return json.dumps([*attrs.astuple(tls), secret.hex(), heard]).encode()


def take_over(sock: socket.socket, told: bytes) -> tuple[socket.socket, Tls | None]:
    """What goes through a connection that was handed on, and the certificates of this machine."""
    import json

    if told == _NO_TLS:
        return sock, None
    *parts, secret, heard = json.loads(told)
    tls = Tls(*parts)
    if heard is None:
        return sock, tls
    secured = Secured(sock, tls.context(server=True), True, bytes.fromhex(heard), bytes.fromhex(secret))
    return secured, tls


def tune_tcp(sock: socket.socket) -> None:
    """Send small messages at once, and find out in seconds that the other machine is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):  # what was said for this connection stays
        cut_after(sock, CUT_AFTER_S)


def cut_after(sock: socket.socket, seconds: float) -> None:
    """Have a connection to another machine taken for cut when nothing of that is heard for so long; whole seconds.

    The kernel asks and answers: a process that is stopped, or busy, isn't taken for a machine that is gone. Nothing is
    changed of connections within a machine.
    """
    if sock.family == socket.AF_UNIX:
        return
    every_s = max(1, round(seconds / (_PROBES + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, every_s * (_PROBES + 1) * 1000)


def _proof(secret: bytes, server: bool) -> bytes:
    """What the server's side of a connection, or the other one, proves itself with."""
    return hmac.digest(secret, b"taken over" if server else b"handed on", "sha256")


def _aborted(error: ssl.SSLError) -> ConnectionAbortedError:
    return ConnectionAbortedError(errno.ECONNABORTED, f"TLS: {error}")
