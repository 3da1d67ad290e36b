"""TLS around connections between machines: a tunnel at each end, through which the plain bytes of a lane go.

Lanes know nothing of it: each side has a local connection whose other end a thread encrypts. Who may talk is decided
twice: by certificates of one authority, as in the cluster, and by the key inside, end to end. Used where the engine's
own connections are encrypted.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import TYPE_CHECKING

import attrs

from colocate.wire._forks import track_socket

if TYPE_CHECKING:
    import ssl  # at run time it is imported where it is used: most workers never need it

NO_TLS = b"-"  # what a worker is handed in the place of certificates
CUT = b"cut"  # and in the place of a lane: the one that it has is over
_CHUNK_BYTES = 1 << 18
_PROBE_EVERY_S, _PROBES = 2, 3


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
        """What a connection is made with. Names aren't checked: the authority signs for the cluster alone."""
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if server:  # nobody resumes; and tickets, which hold certificates, may leave no room for what follows
            context.num_tickets = 0
        context.load_verify_locations(cadata=self.authority)
        memory = os.memfd_create("colocate-tls", os.MFD_CLOEXEC)  # it is loaded from a path, and from nothing else
        try:
            os.write(memory, f"{self.certificate}\n{self.key}\n".encode())
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context


def secure(sock: socket.socket, tls: Tls, where: str) -> socket.socket:
    """Make a dialled connection an encrypted one, and prove both sides by their certificates; it is owned from now on.

    Args:
        sock: The connection, with the time that this may take.
        tls: This side's certificates.
        where: What the error calls it.

    Returns:
        A local connection that leads through it.

    Raises:
        ConnectionRefusedError: It is nobody of the cluster.
    """
    try:
        secured = track_socket(tls.context(server=False).wrap_socket(sock))
        # A listener that refuses our certificate says so only after the handshake, when something is read.
    except (OSError, ValueError) as error:
        sock.close()
        raise ConnectionRefusedError(f"{where} isn't trusted, or doesn't trust this side: {error}") from error
    try:
        return tunnel(secured)
    except BaseException:
        secured.close()
        raise


def tunnel(secured: ssl.SSLSocket) -> socket.socket:
    """Carry what goes through an encrypted connection, on a thread of its own that ends with it.

    Returns:
        A local connection that leads through it.

    Raises:
        OSError: No descriptor is free.
        RuntimeError: No thread is to be had.
    """
    ours, theirs = _local_pair()
    try:
        threading.Thread(target=_Tunnel(secured, theirs).run, name="colocate-tls", daemon=True).start()
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return ours


class _Tunnel:
    """Carries bytes between an encrypted and a plain connection until one of them ends."""

    def __init__(self, secured: ssl.SSLSocket, plain: socket.socket) -> None:
        self._secured = secured
        self._plain = plain
        secured.setblocking(False)
        plain.setblocking(False)
        tune_tcp(secured)
        tune_tcp(plain)

    def run(self) -> None:
        """Carry. TLS is used by this thread alone: one connection mustn't be read and written at the same time."""
        outward, inward = memoryview(b""), memoryview(b"")
        try:
            while True:
                moved = False
                if not outward:
                    outward = memoryview(_read(self._plain))
                if not inward:
                    inward = memoryview(_read(self._secured))
                if outward and (count := _write(self._secured, outward)):
                    outward, moved = outward[count:], True
                if inward and (count := _write(self._plain, inward)):
                    inward, moved = inward[count:], True
                if moved or self._secured.pending():
                    continue
                poll = select.poll()
                # A side from which nothing is wanted isn't looked at, or its end would be found again and again.
                if events := (0 if inward else select.POLLIN) | (select.POLLOUT if outward else 0):
                    poll.register(self._secured, events)
                if events := (0 if outward else select.POLLIN) | (select.POLLOUT if inward else 0):
                    poll.register(self._plain, events)
                poll.poll()
        except (OSError, EOFError):  # one of them has ended: so does the other
            pass
        finally:
            self._secured.close()
            self._plain.close()


def tune_tcp(sock: socket.socket) -> None:
    """Send small messages at once, and find out in seconds that the other machine is gone without a word.

    The kernel asks and answers: a process that is stopped, or busy, isn't taken for a machine that is gone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PROBE_EVERY_S * (_PROBES + 1) * 1000)


def _read(sock: socket.socket) -> bytes:
    """What there is; nothing when there is nothing."""
    import ssl

    try:
        data = sock.recv(_CHUNK_BYTES)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return b""
    if not data:
        raise EOFError
    return data


def _write(sock: socket.socket, data: memoryview) -> int:
    import ssl

    try:
        return sock.send(data)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return 0


def _local_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a loopback connection: over Unix sockets a lane would pass files, which no tunnel carries."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        while True:
            theirs, peer = server.accept()
            if peer == ours.getsockname():  # nobody else's
                return track_socket(ours), track_socket(theirs)
            theirs.close()
