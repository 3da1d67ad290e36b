"""TLS for connections between machines, with the certificates by which the cluster's own connections are encrypted.

Who may talk is decided twice: by certificates of one authority, as in the cluster, and by the key inside, end to end.
"""

from __future__ import annotations

import functools
import hmac
import json
import os
import socket
import time
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import ssl  # at run time it is imported where it is used: most workers never need it

    from colocate.wire._secured import Secured

_NO_TLS = b"-"
CUT_AFTER_S = 15.0
"""A connection to a machine that is gone without a word is taken for cut after so long, unless somebody says more."""
_PROBED_EVERY_S = 1
_LONGEST_MS = 2**31 - 1
_here: list[float] = [CUT_AFTER_S]  # in this process


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
        """Return what connections are made with. Names aren't checked: the authority signs for the cluster alone."""
        return _context(self, server)


@functools.lru_cache(maxsize=4)  # a process has those of one side, and reading them takes 2 ms
def _context(tls: Tls, server: bool) -> ssl.SSLContext:
    import ssl

    from colocate.wire._secured import Secured

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = Secured
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_RENEGOTIATION  # sending never waits for something to be received
    if server:  # nobody resumes, and nothing comes unasked: a connection may be handed on after the handshake
        context.num_tickets = 0
    context.load_verify_locations(cadata=tls.authority)
    memory = os.memfd_create("colocate-tls", os.MFD_CLOEXEC)  # it is loaded from a path, and from nothing else
    try:
        os.write(memory, f"{tls.certificate}\n{tls.key}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def secured(sock: socket.socket) -> Secured | None:
    """Return a socket that has TLS on it; None for another one."""
    if type(sock) is socket.socket:
        return None
    from colocate.wire._secured import Secured

    return sock if isinstance(sock, Secured) else None


def encrypted(sock: socket.socket, context: ssl.SSLContext, server: bool, secret: bytes = b"") -> Secured:
    """Put TLS on a connection, which is detached; it is set up by whatever is received or sent first.

    Args:
        sock: The connection.
        context: `Tls.context`.
        server: The side of this one.
        secret: What both sides prove to know, first of all, if anything; for this one connection.
    """
    from colocate.wire._secured import Secured

    made = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    assert isinstance(made, Secured)
    if secret:
        made.to_say, made.to_hear = _proof(secret, not server), _proof(secret, server)
    return made


def secure(sock: socket.socket, tls: Tls, where: str, deadline: float) -> Secured:
    """Make a dialled connection an encrypted one, until a deadline in monotonic time; it is owned from now on.

    Raises:
        ConnectionRefusedError: It is nobody of the cluster; it is called by `where`.
        TimeoutError: It doesn't answer.
        ConnectionResetError: It has closed the connection.
    """
    try:
        sock = made = encrypted(sock, tls.context(server=False), server=False)
        made.settimeout(max(deadline - time.monotonic(), 0.001))
        made.set_up()
        return made
    except (TimeoutError, ConnectionResetError, BrokenPipeError):
        sock.close()
        raise
    except (OSError, ValueError) as error:
        sock.close()
        raise ConnectionRefusedError(f"{where} isn't trusted, or doesn't trust this side: {error}") from error


def anew(sock: socket.socket, secret: bytes) -> socket.socket:
    """Begin TLS anew on a dialled connection that is handed on at its other end: to who knows a secret of both sides.

    Returns:
        What leads there, without waiting for it. A connection without TLS is the same as before.
    """
    if (before := secured(sock)) is None:
        return sock
    return encrypted(socket.socket(fileno=before.detach()), before.context, server=False, secret=secret)


def hand_on(sock: socket.socket, tls: Tls | None, secret: bytes) -> bytes:
    """Return what the process that is handed a connection is told of it: certificates, and how TLS begins anew."""
    if tls is None:
        return _NO_TLS
    return json.dumps([*attrs.astuple(tls), secret.hex() if secured(sock) is not None else None]).encode()


def take_over(sock: socket.socket, told: bytes) -> tuple[socket.socket, Tls | None]:
    """Return what goes through a connection that was handed on, and the certificates of this machine."""
    if told == _NO_TLS:
        return sock, None
    *parts, secret = json.loads(told)
    tls = Tls(*parts)
    if secret is None:
        return sock, tls
    return encrypted(sock, tls.context(server=True), server=True, secret=bytes.fromhex(secret)), tls


def send_file(sock: socket.socket, file: int, offset: int, count: int) -> int:
    """Send a part of a file, through TLS if there is one; see `os.sendfile`."""
    if (through := secured(sock)) is not None:
        return through.send(os.pread(file, min(count, through.CHUNK_BYTES), offset))
    return os.sendfile(sock.fileno(), file, offset, count)


def tune_tcp(sock: socket.socket) -> None:
    """Send small messages at once, and find out in seconds that the other machine is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):  # what was said for this connection stays
        cut_after(sock, _here[0])


def cut_here_after(seconds: float | None) -> None:
    """Have connections that this process makes from now on taken for cut after so long; None leaves it as it is."""
    if seconds is not None:
        _here[0] = seconds


def cut_after(sock: socket.socket, seconds: float) -> None:
    """Have a connection to another machine taken for cut when nothing of that is heard for so long.

    The kernel asks and answers: a process that is stopped, or busy, isn't taken for a machine that is gone. Nothing is
    changed of connections within a machine. One that has been started anew says at once that it knows nothing of the
    connection.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBED_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBED_EVERY_S)
    # It counts for both: probes that go unanswered, and what was sent and isn't confirmed.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(seconds * 1000, _LONGEST_MS)))


def _proof(secret: bytes, server: bool) -> bytes:
    """Return what the server's side of a connection, or the other one, proves itself with."""
    return hmac.digest(secret, b"taken over" if server else b"handed on", "sha256")
