"""TLS around connections between machines: a tunnel at each end, through which the plain bytes of a lane go.

Lanes know nothing of it. The dialling side has a local connection whose other end a thread encrypts; the listening side
decrypts and connects to its own local listener. Who may talk is decided twice: by certificates of one authority, as in
the cluster, and by the key inside, end to end. Used where the engine's own connections are encrypted.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import TYPE_CHECKING

import attrs

from colocate._jobs import report_exception
from colocate.wire._forks import track_socket
from colocate.wire._listening import NO_ROOM, listening

if TYPE_CHECKING:
    import ssl  # at run time it is imported where it is used: most workers never need it

NO_TLS = b"-"  # what a worker is handed in the place of certificates
CUT = b"cut"  # and in the place of a lane: the one that it has is over
_CHUNK_BYTES = 1 << 18
_HANDSHAKE_S = 10.0
_HANDSHAKES = 64  # at once
_PAUSE_S = 0.05
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
        context.load_verify_locations(cadata=self.authority)
        memory = os.memfd_create("colocate-tls", os.MFD_CLOEXEC)  # it is loaded from a path, and from nothing else
        try:
            os.write(memory, f"{self.certificate}\n{self.key}\n".encode())
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context


def dial_tls(host: str, port: int, tls: Tls, timeout: float) -> socket.socket:
    """Connect to a `TlsDoor`.

    Args:
        host: Its address.
        port: Its port.
        tls: This side's certificates.
        timeout: Seconds for the connection and TLS's handshake each.

    Returns:
        A local connection that leads there.

    Raises:
        ConnectionRefusedError: Nobody listens there, or it is nobody of the cluster.
    """
    where = f"tls:{host}:{port}"
    try:
        outer = track_socket(socket.create_connection((host, port), timeout))
    except OSError as error:
        raise ConnectionRefusedError(f"nobody listens at {where}: {error.strerror or error}") from error
    try:
        secured = tls.context(server=False).wrap_socket(outer)
        # A listener that refuses our certificate says so only after the handshake, when something is read.
    except (OSError, ValueError) as error:
        outer.close()
        raise ConnectionRefusedError(f"{where} isn't trusted, or doesn't trust this side: {error}") from error
    ours, theirs = _local_pair()
    _Tunnel(track_socket(secured), theirs).start()
    return ours


class TlsDoor:
    """Listens for TLS connections, and leads each to a local listener."""

    def __init__(self, host: str, inner: tuple[str, int], tls: Tls) -> None:
        """Listen from now on.

        Args:
            host: The address of this machine to listen on.
            inner: Where the local listener is.
            tls: This side's certificates.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = listening(family, (host, 0))
        self._name = self._sock.getsockname()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._room = threading.Semaphore(_HANDSHAKES)
        self._inner = inner
        self._context = tls.context(server=True)
        self.address = f"tls:{host}:{self._sock.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="colocate-tls-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer; connections go on."""
        with self._lock, contextlib.suppress(OSError):  # it is closed already
            self._closing.set()
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                outer, _ = self._sock.accept()
            except OSError as error:
                if error.errno in NO_ROOM:
                    self._closing.wait(_PAUSE_S)  # a handshake that ends makes some
                elif not _listens(self._sock) and not self._reopened():
                    return
                continue  # that connection has gone again
            track_socket(outer)
            if not self._room.acquire(blocking=False):
                outer.close()
                continue
            try:
                threading.Thread(target=self._lead, args=(outer,), name="colocate-tls-handshake", daemon=True).start()
            except RuntimeError:  # no thread is to be had
                self._room.release()
                outer.close()

    def _reopened(self) -> bool:
        """Listen at the same address again, unless it has been closed."""
        with self._lock:
            if self._closing.is_set():
                return False
            self._sock.close()
            try:
                self._sock = listening(self._sock.family, self._name)
            except OSError:
                report_exception()  # who dials is refused from now on
                return False
            return True

    def _lead(self, outer: socket.socket) -> None:
        outer.settimeout(_HANDSHAKE_S)
        try:
            secured = self._context.wrap_socket(outer, server_side=True)
            inner = socket.create_connection(self._inner)
        except (OSError, ValueError):  # a stranger, or this side is closing
            outer.close()
            return
        finally:
            self._room.release()
        _Tunnel(track_socket(secured), track_socket(inner)).run()


class _Tunnel:
    """Carries bytes between an encrypted and a plain connection until one of them ends."""

    def __init__(self, secured: ssl.SSLSocket, plain: socket.socket) -> None:
        self._secured = secured
        self._plain = plain
        secured.setblocking(False)
        plain.setblocking(False)
        tune_tcp(secured)
        tune_tcp(plain)

    def start(self) -> None:
        """Carry on a thread of its own, which ends with the connection."""
        threading.Thread(target=self.run, name="colocate-tls", daemon=True).start()

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


def _listens(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
