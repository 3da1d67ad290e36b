"""Authenticate connections. Both processes prove the knowledge of a key before anything else is read.

The listener greets with a nonce. The dialler answers with another nonce and a proof; then the listener proves itself. A
proof is an HMAC-SHA256 over the side's name and both nonces, which can't be replayed or reflected. All messages have a
fixed size; no byte of a stranger is ever unpickled. An accepted dialler gets a confirmation: until then other
connections may displace it. On a Unix socket the kernel must also report the same user for the peer. On encrypted
connections all of this happens inside of TLS.

Addresses are text: `unix:NAME` for a name in Linux's abstract namespace, and `tcp:HOST:PORT`, or `tls:HOST:PORT` for an
encrypted connection (see `tls.py`). Several addresses of one listener are joined by commas; a dialler takes the first
that works (a Unix socket works on its own machine only). Abstract names disappear with the socket, also if the process
is killed, while a socket file would stay.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from colocate.wire._forks import track_socket
from colocate.wire.tls import Tls, secure_dialled, tune_tcp

_T = TypeVar("_T")

KEY_BYTES = 32
_NONCE_BYTES = 32
_PROOF_BYTES = 32
GREETING, WELCOME, REFUSED = b"colocate-wire-3\n", b"colocate-good-3\n", b"colocate-none-3\n"
_UCRED = struct.Struct("3i")
_BUFFER_BYTES = 1 << 20
# A refused dialler first pauses up to `_AGAIN_S`, later up to `_LONGEST_AGAIN_S`, at random so that diallers spread.
_AGAIN_S, _LONGEST_AGAIN_S = 0.01, 0.2


def new_key() -> bytes:
    """Return a new secret for a group of processes."""
    return secrets.token_bytes(KEY_BYTES)


def _make_proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    """Return a side's proof of knowing the key.

    Raises:
        ValueError: The key isn't from `new_key`.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this one {len(key)}: use colocate.wire.new_key()")
    return hmac.digest(key, side + b"\0" + nonces, "sha256")


def is_own_user(sock: socket.socket) -> bool:
    """Return whether the peer of a Unix socket belongs to this user, as the kernel reports; True for other sockets."""
    if sock.family != socket.AF_UNIX:
        return True
    _pid, user, _group = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(user == os.geteuid())


def tune_socket(sock: socket.socket) -> None:
    """Set a socket's buffers and flags so that small messages are sent at once, and bursts of messages fit."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    else:
        tune_tcp(sock)


class Handshake:
    """The listener's side of authentication, non-blocking.

    Attributes:
        sock: The connection.
        since: The time of the accept, in monotonic time.
    """

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self.sock = sock
        self.since = time.monotonic()
        self._key = key
        self._nonce = b""
        self._received = b""

    def advance(self) -> None:
        """Process the received bytes. On return the peer is authenticated.

        Raises:
            BlockingIOError: More bytes must arrive.
            OSError: The peer has gone or doesn't know the key: close the socket.
        """
        if not self._nonce:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            # The greeting is short enough for one send. During the TLS handshake the send raises BlockingIOError.
            self.sock.send(GREETING + nonce)
            self._nonce = nonce
        while (missing := _NONCE_BYTES + _PROOF_BYTES - len(self._received)) > 0:
            # Read no byte more, because the bytes after the proof are messages.
            data = self.sock.recv(missing)
            if not data:
                raise ConnectionAbortedError("closed before it was authenticated")
            self._received += data
        nonces = self._nonce + self._received[:_NONCE_BYTES]
        if not hmac.compare_digest(self._received[_NONCE_BYTES:], _make_proof(self._key, b"dialler", nonces)):
            self.sock.send(REFUSED)
            raise ConnectionRefusedError("the other side doesn't know the key")
        self.sock.send(WELCOME + _make_proof(self._key, b"listener", nonces))


def connect(address: str, key: bytes, timeout: float = 10.0, tls: Tls | None = None) -> socket.socket:
    """Connect to a listener and authenticate both sides. Retry if the listener is flooded with connections.

    Args:
        address: The listener's address.
        key: The shared secret.
        timeout: Seconds for all attempts.
        tls: This side's certificates, for addresses that need them.

    Returns:
        The connection, blocking.

    Raises:
        ConnectionError: Nobody listens there, or the listener has another key.
        TimeoutError: The listener didn't answer in time.
    """

    def attempt(left: Callable[[], float]) -> socket.socket:
        sock = dial(address, left(), tls)
        try:
            prove(sock, address, key, left())
        except BaseException:
            sock.close()
            raise
        return sock

    return connect_with_retry(attempt, timeout)


class TurnedAway(ConnectionError):
    """Raised if a listener closes a connection before authentication, because of too many connections or at its end."""


def connect_with_retry(attempt: Callable[[Callable[[], float]], _T], timeout: float) -> _T:
    """Call `attempt`, and again after each `TurnedAway`; the argument of `attempt` returns the seconds left.

    Raises:
        TimeoutError: The time is over; the error says whether the listener has turned this side away.
    """
    deadline = time.monotonic() + timeout
    turned_away: TurnedAway | None = None
    longest = _AGAIN_S
    while True:
        try:
            return attempt(lambda: max(deadline - time.monotonic(), 0.001))
        except TurnedAway as error:
            turned_away = error
        except TimeoutError as error:
            if turned_away is None:
                raise
            raise TimeoutError(f"{turned_away}, until the time was over") from error
        pause = random.uniform(0.5, 1.0) * longest
        if time.monotonic() + pause > deadline:
            raise TimeoutError(f"{turned_away}, until the time was over") from turned_away
        time.sleep(pause)
        longest = min(2 * longest, _LONGEST_AGAIN_S)


def dial(address: str, timeout: float, tls: Tls | None = None) -> socket.socket:
    """Dial a listener without authentication, as the first half of `connect`, with the same errors.

    The timeout applies to the connection, and once more to the TLS handshake.
    """
    *firsts, last = address.split(",")
    for alternative in firsts:
        with contextlib.suppress(ConnectionRefusedError):  # The address may be a Unix socket of another machine.
            return _dial(alternative, timeout, tls)
    return _dial(last, timeout, tls)


def _dial(address: str, timeout: float, tls: Tls | None) -> socket.socket:
    kind, _, place = address.partition(":")
    target: str | tuple[str, int]
    if kind == "unix":
        family, target = socket.AF_UNIX, f"\0{place}"
    elif kind in ("tcp", "tls"):
        host, _, port = place.rpartition(":")
        family, target = (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))
    else:
        raise ValueError(f"{address!r} is no address: it should begin with 'unix:', 'tcp:' or 'tls:'")
    if kind == "tls" and tls is None:
        raise ConnectionRefusedError(f"{address} needs certificates, and this side has none")
    sock = track_socket(socket.socket(family))
    try:
        # With `settimeout` a Unix socket would fail at once if the listener's backlog is full. Zero means no timeout.
        limit = struct.pack("@ll", int(timeout), max(int(timeout % 1 * 1e6), 1))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(target)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 0))
    except OSError as error:
        sock.close()
        if isinstance(error, BlockingIOError | TimeoutError):
            raise TimeoutError(f"{address} didn't accept a connection within {timeout:g} s") from error
        raise ConnectionRefusedError(f"nobody listens at {address}: {error.strerror or error}") from error
    tune_socket(sock)
    if kind != "tls" or tls is None:
        return sock
    with _explain_end(address):
        return secure_dialled(sock, tls, address, time.monotonic() + timeout)


def prove(sock: socket.socket, address: str, key: bytes, timeout: float) -> None:
    """Authenticate a dialled connection, as the second half of `connect`, with the same errors.

    Raises:
        TurnedAway: The listener had no room; another attempt may succeed (`connect_with_retry`).
    """
    if not is_own_user(sock):
        raise ConnectionRefusedError(f"{address} is served by another user's process: not connecting")
    deadline = time.monotonic() + timeout

    def hear(count: int) -> bytes:  # Reads exactly `count` bytes before the deadline.
        data = b""
        while len(data) < count:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            part = sock.recv(count - len(data))
            if not part:
                raise ConnectionResetError("closed")
            data += part
        return data

    with _explain_end(address):
        if hear(len(GREETING)) != GREETING:
            raise ConnectionRefusedError(f"what listens at {address} doesn't speak this version of colocate's wire")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = hear(_NONCE_BYTES) + nonce
        sock.sendall(nonce + _make_proof(key, b"dialler", nonces))
        if hear(len(WELCOME)) != WELCOME:
            raise ConnectionRefusedError(f"what listens at {address} has refused this side: the keys differ")
        if not hmac.compare_digest(hear(_PROOF_BYTES), _make_proof(key, b"listener", nonces)):
            raise ConnectionRefusedError(f"what listens at {address} doesn't know the key: not talking to it")
    sock.settimeout(None)


@contextlib.contextmanager
def _explain_end(address: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{address} accepted the connection but didn't answer in time") from error
    except ConnectionAbortedError as error:
        raise ConnectionRefusedError(f"{address} isn't trusted, or doesn't trust this side: {error}") from error
    except (ConnectionResetError, BrokenPipeError) as error:
        raise TurnedAway(
            f"{address} closed the connection before it was authenticated: it is flooded with connections, or ending"
        ) from error
