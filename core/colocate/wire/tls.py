"""Encrypt connections between machines by TLS, with the certificates that the cluster uses itself.

Access is checked twice: by certificates of one authority, as in the cluster, and by the key, inside of TLS.
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
    import ssl  # Imported late at run time, because most workers never need TLS.

    from colocate.wire._secured import Secured

_NO_TLS = b"-"
CUT_AFTER_S = 15.0
"""Default seconds without any sign of a machine after which a connection counts as cut."""
_PROBED_EVERY_S = 1
_LONGEST_MS = 2**31 - 1
_default_cut_s: list[float] = [CUT_AFTER_S]  # This process's seconds until a connection counts as cut.


@attrs.frozen
class Tls:
    """The certificates of one side, as PEM text.

    Attributes:
        authority: The certificates of the authority that has signed all sides' certificates.
        certificate: This side's certificate.
        key: This side's private key.
    """

    authority: str
    certificate: str
    key: str = attrs.field(repr=False)

    def context(self, server: bool) -> ssl.SSLContext:
        """Return the SSL context. Host names aren't checked, because the authority signs for the cluster only."""
        return _create_context(self, server)


@functools.lru_cache(maxsize=4)  # Cached, because reading the certificates takes 2 ms.
def _create_context(tls: Tls, server: bool) -> ssl.SSLContext:
    import ssl

    from colocate.wire._secured import Secured

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = Secured
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_RENEGOTIATION  # Without renegotiation, sending never waits for received data.
    if server:  # Without tickets no unrequested data arrive, so that another process can take over the connection.
        context.num_tickets = 0
    context.load_verify_locations(cadata=tls.authority)
    memory = os.memfd_create("colocate-tls", os.MFD_CLOEXEC)  # OpenSSL loads certificate and key from a path only.
    try:
        os.write(memory, f"{tls.certificate}\n{tls.key}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def get_secured(sock: socket.socket) -> Secured | None:
    """Return a socket as `Secured`, or None for a socket without TLS."""
    if type(sock) is socket.socket:
        return None
    from colocate.wire._secured import Secured

    return sock if isinstance(sock, Secured) else None


def wrap_tls(sock: socket.socket, context: ssl.SSLContext, server: bool, secret: bytes = b"") -> Secured:
    """Wrap a connection in TLS, and detach the socket. The handshake runs with the first receive or send.

    Args:
        sock: The connection.
        context: The context from `Tls.context`.
        server: Whether this is the server's side.
        secret: A secret for this connection that both sides prove first; empty for none.
    """
    from colocate.wire._secured import Secured

    connection = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    assert isinstance(connection, Secured)
    if secret:
        connection.unsent_proof, connection.expected_proof = (
            _make_proof(secret, not server),
            _make_proof(secret, server),
        )
    return connection


def secure_dialled(sock: socket.socket, tls: Tls, where: str, deadline: float) -> Secured:
    """Encrypt a dialled connection before a deadline in monotonic time. The result owns the socket.

    Raises:
        ConnectionRefusedError: The peer isn't of the cluster; `where` names the peer in the error.
        TimeoutError: The peer doesn't answer.
        ConnectionResetError: The peer has closed the connection.
    """
    try:
        sock = connection = wrap_tls(sock, tls.context(server=False), server=False)
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.set_up()
        return connection
    except (TimeoutError, ConnectionResetError, BrokenPipeError):
        sock.close()
        raise
    except (OSError, ValueError) as error:
        sock.close()
        raise ConnectionRefusedError(f"{where} isn't trusted, or doesn't trust this side: {error}") from error


def restart_tls(sock: socket.socket, secret: bytes) -> socket.socket:
    """Restart TLS on a dialled connection that the other side passes to another process with the same secret.

    Returns:
        The new socket, with the handshake pending. A connection without TLS is returned unchanged.
    """
    if (before := get_secured(sock)) is None:
        return sock
    return wrap_tls(socket.socket(fileno=before.detach()), before.context, server=False, secret=secret)


def describe_handover(sock: socket.socket, tls: Tls | None, secret: bytes) -> bytes:
    """Return the data for a process that takes over a connection: the certificates, and the secret if TLS restarts."""
    if tls is None:
        return _NO_TLS
    return json.dumps([*attrs.astuple(tls), secret.hex() if get_secured(sock) is not None else None]).encode()


def take_over(sock: socket.socket, told: bytes) -> tuple[socket.socket, Tls | None]:
    """Take over a connection from another process; return the connection, with TLS restarted, and the certificates."""
    if told == _NO_TLS:
        return sock, None
    *parts, secret = json.loads(told)
    tls = Tls(*parts)
    if secret is None:
        return sock, tls
    return wrap_tls(sock, tls.context(server=True), server=True, secret=bytes.fromhex(secret)), tls


def send_file(sock: socket.socket, file: int, offset: int, count: int) -> int:
    """Send a part of a file as `os.sendfile` does, through TLS if the connection is encrypted."""
    if (through := get_secured(sock)) is not None:
        return through.send(os.pread(file, min(count, through.CHUNK_BYTES), offset))
    return os.sendfile(sock.fileno(), file, offset, count)


def tune_tcp(sock: socket.socket) -> None:
    """Set a TCP socket to send small messages at once, and to detect a dead machine within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):  # A timeout that was set before stays.
        set_cut_timeout(sock, _default_cut_s[0])


def set_default_cut(seconds: float | None) -> None:
    """Set the seconds of silence after which new connections of this process count as cut; None changes nothing."""
    if seconds is not None:
        _default_cut_s[0] = seconds


def set_cut_timeout(sock: socket.socket, seconds: float) -> None:
    """Set the seconds without any sign of the other machine after which a connection counts as cut.

    The kernels probe each other, so that a stopped or busy process doesn't count as a dead machine. Connections within
    a machine are unchanged. A rebooted machine rejects the connection at once.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBED_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBED_EVERY_S)
    # This timeout applies to unanswered probes, and to sent data without an acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(seconds * 1000, _LONGEST_MS)))


def _make_proof(secret: bytes, server: bool) -> bytes:
    return hmac.digest(secret, b"taken over" if server else b"handed on", "sha256")
