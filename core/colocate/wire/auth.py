"""Connections between processes that prove to each other that they know one key, before anything else is read.

How they do is in `handshake.py`, with the listener's side of it; this is the dialler's. Who was turned away for others
dials again.

Addresses are text: `unix:NAME`, a name in Linux's abstract namespace, and `tcp:HOST:PORT`; several, by commas, are
ways to one listener, of which a dialler takes the first that works (a Unix socket does on its own machine); with
`tls:HOST:PORT` the connection is encrypted besides (see `tls.py`). Abstract names vanish with their socket, also when
the process is killed, where a socket in a directory would stay; what a directory's mode would do is done by asking the
kernel for the other side's user: only one's own gets as far as the proof.
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
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from colocate.wire._forks import track_socket
from colocate.wire._listening import REOPEN_EVERY_S, REOPENS_WITHIN_S, listening, listening_within
from colocate.wire.handshake import (
    GREETING,
    KEY_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    TURNED_AWAY,
    Handshake,
    SecureHandshake,
    check_key,
    proof,
    tune,
)
from colocate.wire.tls import Tls, secure

if TYPE_CHECKING:
    import ssl

Kind: TypeAlias = Literal["unix", "tcp"]
_T = TypeVar("_T")

LOOPBACK = "127.0.0.1"
_UCRED = struct.Struct("3i")
# A dialler that was turned away comes again after a time like this, longer each time; by chance, or all would again.
_AGAIN_S, _LONGEST_AGAIN_S = 0.01, 0.2


def new_key() -> bytes:
    """A fresh secret for one group of processes."""
    return secrets.token_bytes(KEY_BYTES)


class Listener:
    """A listening socket; `Hub.listen` serves it.

    Attributes:
        address: What others pass to `connect`.
    """

    def __init__(self, sock: socket.socket, address: str, context: ssl.SSLContext | None = None) -> None:
        self._sock = sock
        self._name = sock.getsockname()  # a TCP socket that is shut down has none any more
        self._context = context
        self.address = address

    def fileno(self) -> int:
        """The descriptor; -1 when closed."""
        return self._sock.fileno()

    def accept(self) -> socket.socket | None:
        """A waiting connection, not yet authenticated and non-blocking.

        Returns:
            The connection; None when the kernel says that its other side belongs to another user.

        Raises:
            BlockingIOError: Nobody waits.
        """
        sock, _ = self._sock.accept()
        track_socket(sock)
        if not _is_own_user(sock):
            sock.close()
            return None
        sock.setblocking(False)
        return sock

    def handshake(self, sock: socket.socket, key: bytes) -> Handshake:
        """How the other side of an accepted connection is to prove that it knows the key.

        Raises:
            OSError: It has gone already.
        """
        return Handshake(sock, key) if self._context is None else SecureHandshake(sock, key, self._context)

    def reopen(self) -> None:
        """Listen at the same address again.

        Raises:
            OSError: Somebody else does.
        """
        family = self._sock.family
        self._sock.close()
        self._sock = listening(family, self._name)
        self._sock.setblocking(False)

    def close(self) -> None:
        """Stop listening; the address is gone."""
        self._sock.close()


def listen_widely(
    host: str | None,
    tls: Tls | None = None,
    *,
    bind: str | None = None,
    ports: tuple[int, int] | None = None,
    what: str = "a listener",
) -> list[Listener]:
    """Open what others on this machine reach and, with a host, what those on other machines do.

    Args:
        host: The address of this machine under which others reach it.
        tls: What the connections from other machines are encrypted with.
        bind: See `listen`.
        ports: See `listen`.
        what: See `listen`.

    Returns:
        The listeners; an address for all of them is theirs, joined by commas.

    Raises:
        OSError: See `listen`; nothing is left open.
    """
    # First: it may raise.
    widely = [] if host is None else [listen("tcp", host, tls, bind=bind, ports=ports, what=what)]
    return [listen("unix"), *widely]


def listen(
    kind: Kind = "unix",
    host: str = LOOPBACK,
    tls: Tls | None = None,
    *,
    bind: str | None = None,
    ports: tuple[int, int] | None = None,
    what: str = "a listener",
) -> Listener:
    """Open a listening socket.

    Args:
        kind: `"unix"` (only this machine reaches it; faster: large memory is passed, not copied) or `"tcp"`.
        host: With `"tcp"`: the address of this machine that others dial; loopback for this machine only.
        tls: With `"tcp"`: what the connections are encrypted with.
        bind: With `"tcp"`: the address to listen on, where that isn't the one that others dial; "0.0.0.0" for all.
        ports: With `"tcp"`: the first and the last port of those to listen on; None for any that is free.
        what: What needs the port, for the error when none of them is free.

    Returns:
        The listener.

    Raises:
        OSError: It can't be listened there, or no port of these is free.
    """
    context = None if tls is None else tls.context(server=True)
    if kind == "unix":
        name = f"colocate-{secrets.token_hex(16)}"
        sock = listening(socket.AF_UNIX, f"\0{name}")
        address = f"unix:{name}"
    elif kind == "tcp":
        sock = listening_within(bind or host, ports, what)
        address = f"{'tcp' if context is None else 'tls'}:{host}:{sock.getsockname()[1]}"
    else:
        raise ValueError(f"no kind of address is called {kind!r}: use 'unix' or 'tcp'")
    sock.setblocking(False)
    return Listener(sock, address, context)


def connect(address: str, key: bytes, timeout: float = 10.0, tls: Tls | None = None) -> socket.socket:
    """Connect to a listener and authenticate, both ways; again, while it turns this side away for others.

    Args:
        address: A listener's address.
        key: The secret that both sides know.
        timeout: Seconds for all of it.
        tls: This side's certificates, for addresses that need them.

    Returns:
        The connection, blocking.

    Raises:
        ConnectionError: Nobody listens there, or it is someone with another key.
        TimeoutError: The other side didn't answer in time.
    """

    def attempt(left: Callable[[], float]) -> socket.socket:
        sock = dial(address, left(), tls, key)
        try:
            prove(sock, address, key, left())
        except BaseException:
            sock.close()
            raise
        return sock

    return until_let_in(attempt, timeout)


class TurnedAway(ConnectionError):
    """The listener has more connections of strangers than it keeps, and this was one of them."""


def until_let_in(attempt: Callable[[Callable[[], float]], _T], timeout: float) -> _T:
    """Dial again while the listener turns this side away.

    Args:
        attempt: Dials once; it is told what gives the seconds that are left.
        timeout: Seconds for all attempts.

    Returns:
        What the attempt that was let in returned.

    Raises:
        TimeoutError: The time was over; if the listener ever turned this side away, the error says so, since that the
            last attempt got no answer in what time was left to it says nothing.
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
            raise _never_let_in(turned_away) from error
        pause = random.uniform(0.5, 1.0) * longest
        if time.monotonic() + pause > deadline:
            raise _never_let_in(turned_away) from turned_away
        time.sleep(pause)
        longest = min(2 * longest, _LONGEST_AGAIN_S)


def _never_let_in(turned_away: TurnedAway) -> TimeoutError:
    return TimeoutError(f"{turned_away}, until the time was over")


def dial(address: str, timeout: float, tls: Tls | None = None, key: bytes = b"") -> socket.socket:
    """The first half of `connect`: a connection whose other side hasn't proved the key yet.

    Args:
        address: See `connect`.
        timeout: Seconds for the connection, and again for what makes it a secure one.
        tls: See `connect`.
        key: With it is knocked where `tls` is used.

    Raises:
        TurnedAway: Where `tls` is used: see `prove`.
        ConnectionError: See `connect`.
        TimeoutError: See `connect`.
    """
    deadline = time.monotonic() + min(timeout, REOPENS_WITHIN_S)
    while True:
        try:
            sock, dialled = _dial_any(address, timeout, tls)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(REOPEN_EVERY_S)  # a listener that was shut down listens again at once
    if tls is None or not dialled.startswith("tls:"):
        return sock
    try:
        deadline = time.monotonic() + timeout
        with _explained(dialled):
            _knock(sock, dialled, key, deadline)
        return secure(sock, tls, dialled, deadline)
    except BaseException:
        sock.close()
        raise


def _dial_any(address: str, timeout: float, tls: Tls | None) -> tuple[socket.socket, str]:
    *firsts, last = address.split(",")
    for alternative in firsts:
        try:
            return _dial(alternative, timeout, tls), alternative
        except ConnectionRefusedError:  # a Unix socket of another machine, say
            continue
    return _dial(last, timeout, tls), last


def _dial(address: str, timeout: float, tls: Tls | None) -> socket.socket:
    kind, _, place = address.partition(":")
    target: str | tuple[str, int]
    if kind == "unix":
        family, target = socket.AF_UNIX, f"\0{place}"
    elif kind in ("tcp", "tls"):
        if kind == "tls" and tls is None:
            raise ConnectionRefusedError(f"{address} needs certificates, and this side has none")
        host, _, port = place.rpartition(":")
        family, target = (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))
    else:
        raise ValueError(f"{address!r} is no address: it should begin with 'unix:', 'tcp:' or 'tls:'")
    sock = track_socket(socket.socket(family))
    try:
        # Not settimeout: with it a Unix socket fails at once when many others are waiting to be accepted.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(timeout), _micros(timeout)))
        sock.connect(target)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 0))
    except OSError as error:
        sock.close()
        if isinstance(error, BlockingIOError | TimeoutError):
            raise TimeoutError(f"{address} didn't accept a connection within {timeout:g} s") from error
        raise ConnectionRefusedError(f"nobody listens at {address}: {error.strerror or error}") from error
    tune(sock)
    return sock


def prove(sock: socket.socket, address: str, key: bytes, timeout: float) -> None:
    """The second half of `connect`: authenticate a dialled connection.

    Raises:
        TurnedAway: The listener had no room for it; another one may do better (`until_let_in`).
        ConnectionError: See `connect`.
        TimeoutError: See `connect`.
    """
    check_key(key)
    if not _is_own_user(sock):
        raise ConnectionRefusedError(f"{address} is served by another user's process: not connecting")
    deadline = time.monotonic() + timeout
    with _explained(address):
        nonce = _knock(sock, address, key, deadline)
        nonces = _receive(sock, NONCE_BYTES, deadline) + nonce
        theirs = _receive(sock, PROOF_BYTES, deadline)
        if not hmac.compare_digest(theirs, proof(key, b"listener", nonces)):
            raise ConnectionRefusedError(f"what listens at {address} doesn't know the key: not talking to it")
        sock.sendall(proof(key, b"dialler", nonces))
    sock.settimeout(None)


def _knock(sock: socket.socket, address: str, key: bytes, deadline: float) -> bytes:
    """Show that this side knows the key, and hear that there is room for it; the nonce."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it has said before it closed is read
        sock.sendall(nonce + proof(key, b"knock", nonce))
    greeting = _receive(sock, len(GREETING), deadline)
    if greeting == TURNED_AWAY:
        raise TurnedAway(f"{address} turned this side away: it is flooded with connections")
    if greeting != GREETING:
        raise ConnectionRefusedError(f"what listens at {address} doesn't speak this version of colocate's wire")
    return nonce


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Say of a connection that ends too early whose it was."""
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{address} accepted the connection but didn't answer in time") from error
    except ConnectionAbortedError as error:
        raise ConnectionRefusedError(f"{address} isn't trusted, or doesn't trust this side: {error}") from error
    except (EOFError, ConnectionResetError, BrokenPipeError) as error:
        raise ConnectionRefusedError(
            f"{address} closed the connection before it was authenticated: the keys differ, or the process ended"
        ) from error


def _is_own_user(sock: socket.socket) -> bool:
    if sock.family != socket.AF_UNIX:
        return True
    _pid, user, _group = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(user == os.geteuid())


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly so many bytes, before the deadline however slowly they come."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _micros(seconds: float) -> int:
    # A timeout of zero would mean none.
    return max(int(seconds % 1 * 1e6), 1)
