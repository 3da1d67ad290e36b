"""Connections between processes that prove to each other that they know one key, before anything else is read.

The dialler knocks, at once: a nonce, and an HMAC-SHA256 of that. Who knocks like this has known the key, or has heard
somebody who does; a listener that is flooded keeps its connection, and turns away others. Then each side proves
itself, the listener first, by an HMAC over its name and both nonces, so that no proof can be replayed or reflected. All
messages have a fixed size; no byte of a stranger is ever unpickled. Who was turned away for others dials again.

Addresses are text: `unix:NAME`, a name in Linux's abstract namespace, and `tcp:HOST:PORT`; several, by commas, are
ways to one listener, of which a dialler takes the first that works (a Unix socket does on its own machine); with
`tls:HOST:PORT` the connection is encrypted besides (see `tls.py`). Abstract
names vanish with their socket, also when the process is killed, where a socket in a directory would stay; what a
directory's mode would do is done by asking the kernel for the other side's user: only one's own gets as far as the
proof.
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
from typing import Literal, TypeAlias

from colocate.wire._forks import track_socket
from colocate.wire._listening import REOPEN_EVERY_S, REOPENS_WITHIN_S, listening
from colocate.wire.tls import Tls, TlsDoor, dial_tls, tune_tcp

Kind: TypeAlias = Literal["unix", "tcp"]

KEY_BYTES = 32
LOOPBACK = "127.0.0.1"
_GREETING = b"colocate-wire-2\n"
_TURNED_AWAY = b"colocate-busy-2\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_KNOCK_BYTES = _NONCE_BYTES + _PROOF_BYTES
_UCRED = struct.Struct("3i")
# A dialler that was turned away comes again after a time like this, longer each time; by chance, or all would again.
_AGAIN_S, _LONGEST_AGAIN_S = 0.01, 0.2
_BUFFER_BYTES = 1 << 20


def new_key() -> bytes:
    """A fresh secret for one group of processes."""
    return secrets.token_bytes(KEY_BYTES)


class Listener:
    """A listening socket; `Hub.listen` serves it.

    Attributes:
        address: What others pass to `connect`.
    """

    def __init__(self, sock: socket.socket, address: str, door: TlsDoor | None = None) -> None:
        self._sock = sock
        self._name = sock.getsockname()  # a TCP socket that is shut down has none any more
        self._door = door
        self.address = address if door is None else door.address

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
        if self._door is not None:
            self._door.close()
        self._sock.close()


def listen_widely(host: str | None, tls: Tls | None = None) -> list[Listener]:
    """Open what others on this machine reach and, with a host, what those on other machines do.

    Args:
        host: The address of this machine under which others reach it.
        tls: What the connections from other machines are encrypted with.

    Returns:
        The listeners; an address for all of them is theirs, joined by commas.
    """
    listeners = [listen("unix")]
    if host is not None and tls is None:
        listeners.append(listen("tcp", host))
    elif host is not None and tls is not None:
        inner = listen("tcp")
        listeners.append(Listener(inner._sock, inner.address, TlsDoor(host, inner._sock.getsockname(), tls)))
    return listeners


def listen(kind: Kind = "unix", host: str = "127.0.0.1") -> Listener:
    """Open a listening socket.

    Args:
        kind: `"unix"` (only this machine reaches it; faster: large memory is passed, not copied) or `"tcp"`.
        host: With `"tcp"`: the address of this machine to listen on; loopback for this machine only.

    Returns:
        The listener.
    """
    if kind == "unix":
        name = f"colocate-{secrets.token_hex(16)}"
        sock = listening(socket.AF_UNIX, f"\0{name}")
        address = f"unix:{name}"
    elif kind == "tcp":
        sock = listening(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0))
        address = f"tcp:{host}:{sock.getsockname()[1]}"
    else:
        raise ValueError(f"no kind of address is called {kind!r}: use 'unix' or 'tcp'")
    sock.setblocking(False)
    return Listener(sock, address)


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
    patience = Patience(timeout)
    while True:
        sock = dial(address, patience.left(), tls)
        try:
            prove(sock, address, key, patience.left())
        except TurnedAway as error:
            sock.close()
            patience.take(error)
        except BaseException:
            sock.close()
            raise
        else:
            return sock


class TurnedAway(ConnectionError):
    """The listener has more connections of strangers than it keeps, and this was one of them."""


class Patience:
    """How long a dialler that is turned away comes again."""

    def __init__(self, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout
        self._pause = _AGAIN_S

    def left(self) -> float:
        """Seconds until its deadline."""
        return max(self._deadline - time.monotonic(), 0.001)

    def take(self, error: TurnedAway) -> None:
        """Wait a moment; the error, when there is no time left."""
        pause = random.uniform(0.5, 1.0) * self._pause
        if time.monotonic() + pause > self._deadline:
            raise TimeoutError(f"{error}, until the time was over") from error
        time.sleep(pause)
        self._pause = min(2 * self._pause, _LONGEST_AGAIN_S)


def dial(address: str, timeout: float, tls: Tls | None = None) -> socket.socket:
    """The first half of `connect`: a connection that isn't authenticated yet."""
    deadline = time.monotonic() + min(timeout, REOPENS_WITHIN_S)
    while True:
        try:
            return _dial_any(address, timeout, tls)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(REOPEN_EVERY_S)  # a listener that was shut down listens again at once


def _dial_any(address: str, timeout: float, tls: Tls | None) -> socket.socket:
    *firsts, last = address.split(",")
    for alternative in firsts:
        try:
            return _dial(alternative, timeout, tls)
        except ConnectionRefusedError:  # a Unix socket of another machine, say
            continue
    return _dial(last, timeout, tls)


def _dial(address: str, timeout: float, tls: Tls | None) -> socket.socket:
    kind, _, place = address.partition(":")
    target: str | tuple[str, int]
    if kind == "unix":
        family, target = socket.AF_UNIX, f"\0{place}"
    elif kind == "tcp":
        host, _, port = place.rpartition(":")
        family, target = (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))
    elif kind == "tls":
        if tls is None:
            raise ConnectionRefusedError(f"{address} needs certificates, and this side has none")
        host, _, port = place.rpartition(":")
        return dial_tls(host, int(port), tls, timeout)
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
        TurnedAway: The listener had no room for it; another one may do better (`Patience`).
        ConnectionError: See `connect`.
        TimeoutError: See `connect`.
    """
    _check_key(key)
    if not _is_own_user(sock):
        raise ConnectionRefusedError(f"{address} is served by another user's process: not connecting")
    deadline = time.monotonic() + timeout
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it has said before it closed is read
            sock.sendall(nonce + _proof(key, b"knock", nonce))
        greeting = _receive(sock, len(_GREETING), deadline)
        if greeting == _TURNED_AWAY:
            raise TurnedAway(f"{address} turned this side away: it is flooded with connections")
        if greeting != _GREETING:
            raise ConnectionRefusedError(f"what listens at {address} doesn't speak this version of colocate's wire")
        nonces = _receive(sock, _NONCE_BYTES, deadline) + nonce
        proof = _receive(sock, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(key, b"listener", nonces)):
            raise ConnectionRefusedError(f"what listens at {address} doesn't know the key: not talking to it")
        sock.sendall(_proof(key, b"dialler", nonces))
    except TimeoutError as error:
        raise TimeoutError(f"{address} accepted the connection but didn't answer in time") from error
    except (EOFError, ConnectionResetError, BrokenPipeError) as error:
        raise ConnectionRefusedError(
            f"{address} closed the connection before it was authenticated: the keys differ, or the process ended"
        ) from error
    sock.settimeout(None)


class Handshake:
    """The listener's side of one connection's authentication, without blocking.

    Attributes:
        sock: The connection.
        since: When it came, in monotonic time.
        knocked: Whether who dials has shown that it knew the key.
    """

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        _check_key(key)
        self.sock = sock
        self._key = key
        self._nonces = secrets.token_bytes(_NONCE_BYTES)
        self._heard = bytearray()
        self.since = time.monotonic()
        self.knocked = False
        tune(sock)

    def advance(self) -> bool:
        """Read what has come.

        Returns:
            Whether the other side is authenticated (the socket is ready for messages).

        Raises:
            BlockingIOError: Nothing has come.
            ConnectionError: The other side has gone or doesn't know the key: close the socket.
        """
        if not self.knocked:
            if self._hear(_KNOCK_BYTES):
                self._answer_knock()
            return False
        if not self._hear(_PROOF_BYTES):
            return False
        if not hmac.compare_digest(self._heard, _proof(self._key, b"dialler", self._nonces)):
            raise ConnectionRefusedError("the other side doesn't know the key")
        return True

    def turn_away(self) -> None:
        """Say that there was no room for it. It is to be closed then."""
        with contextlib.suppress(OSError):  # it has gone already
            self.sock.send(_TURNED_AWAY)

    def _answer_knock(self) -> None:
        nonce, knock = bytes(self._heard[:_NONCE_BYTES]), self._heard[_NONCE_BYTES:]
        if not hmac.compare_digest(knock, _proof(self._key, b"knock", nonce)):
            raise ConnectionRefusedError("the other side doesn't know the key")
        self.knocked = True
        self._heard.clear()
        own = self._nonces
        self._nonces = own + nonce
        self.sock.send(_GREETING + own + _proof(self._key, b"listener", self._nonces))

    def _hear(self, count: int) -> bool:
        """Whether so many bytes have come. Never one more: what follows the proof belongs to the messages."""
        data = self.sock.recv(count - len(self._heard))
        if not data:
            raise ConnectionAbortedError("closed before it was authenticated")
        self._heard += data
        return len(self._heard) == count


def tune(sock: socket.socket) -> None:
    """Buffers and flags for messages: a small one goes out at once, a burst of them fits."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    else:
        tune_tcp(sock)


def _proof(key: bytes, side: bytes, nonces: bytes | bytearray) -> bytes:
    return hmac.digest(key, side + b"\0" + nonces, "sha256")


def _check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this one {len(key)}: use colocate.wire.new_key()")


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
