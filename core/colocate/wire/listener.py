"""Listening sockets, and the connections to them that are still proving who they are."""

from __future__ import annotations

import errno
import random
import resource
import secrets
import select
import socket
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from colocate._system.jobs import report_exception
from colocate._system.limits import HANDSHAKE_S
from colocate.errors import ClosedError
from colocate.wire._forks import track_socket
from colocate.wire.hello import Hello, is_own_user, tune
from colocate.wire.tls import Tls, encrypted, secured

if TYPE_CHECKING:
    import ssl

Kind: TypeAlias = Literal["unix", "tcp"]

LOOPBACK = "127.0.0.1"
# What waits for its turn when many workers dial at once.
_BACKLOG = 1024
# So many strangers are heard at the same time, unless that is too many for the descriptors of this process. Whoever
# comes then takes the place of any of them: who says nothing is displaced in the end, who knows the key comes again.
_MOST_STRANGERS = 512
_ACCEPTS = 16
# How long a listener pauses when the process has no free descriptor.
_PAUSE_S = 0.1
# What `accept` says when its process, or the machine, is full.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Server(Protocol):
    """What a listener needs of the hub that serves it."""

    @property
    def is_closing(self) -> bool:
        """Whether it serves nothing new."""
        ...

    def serve(self, fd: int, handler: Callable[[int], None]) -> None:
        """Tell of the events of a descriptor from now on; raises `ClosedError`."""

    def look_for(self, sock: socket.socket, events: int) -> None:
        """Look for these events of a socket from now on."""

    def drop(self, sock: socket.socket) -> None:
        """Serve a socket no longer."""

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action on the hub's thread after some time."""


class Listener:
    """A listening socket; `Hub.listen` serves it.

    Attributes:
        address: What others pass to `connect`.
    """

    def __init__(self, sock: socket.socket, address: str, context: ssl.SSLContext | None = None) -> None:
        self._sock = sock
        self._context = context
        self.address = address
        self._strangers: dict[int, Hello] = {}  # by descriptor, the oldest first
        self._most = min(_MOST_STRANGERS, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._sweeping = False

    def fileno(self) -> int:
        """Return the descriptor; -1 when closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Stop listening; the address is gone."""
        self._sock.close()

    # What follows is for the hub that serves it.

    def begin(self, hub: Server, key: bytes, on_accept: Callable[[socket.socket], None]) -> None:
        """Be served from now on; the arguments are those of `Hub.listen`."""
        self._hub, self._key, self._on_accept = hub, key, on_accept

    def end(self) -> None:
        """Close the socket, and what hasn't become a connection."""
        for hello in list(self._strangers.values()):
            self._drop(hello)
        if self._sock.fileno() >= 0:
            self._hub.drop(self._sock)
        self.close()

    def on_events(self, events: int) -> None:
        """Let in who has come."""
        if events & select.EPOLLHUP:  # it was shut down from outside: who dials is refused from now on
            self.end()
            return
        for _ in range(_ACCEPTS):
            try:
                sock = track_socket(self._sock.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._make_room()
                    return
                continue  # That connection has gone again.
            if is_own_user(sock):
                self._greet(sock)
            else:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        if len(self._strangers) >= self._most:
            self._displace()
        try:
            sock.setblocking(False)
            tune(sock)
            if self._context is not None:
                sock = encrypted(sock, self._context, server=True)
            hello = Hello(sock, self._key)
            self._hub.serve(sock.fileno(), lambda _events: self._advance(hello))
        except (OSError, ValueError, ClosedError):  # it has gone, or the hub is being closed
            sock.close()
            return
        self._strangers[sock.fileno()] = hello
        if not self._sweeping:
            self._sweep()
        self._advance(hello)

    def _advance(self, hello: Hello) -> None:
        try:
            hello.advance()
        except BlockingIOError:
            if (through := secured(hello.sock)) is not None:
                self._hub.look_for(hello.sock, select.EPOLLOUT if through.wants_write else select.EPOLLIN)
            return
        except OSError:
            self._drop(hello)
            return
        del self._strangers[hello.sock.fileno()]
        self._hub.drop(hello.sock)
        try:
            self._on_accept(hello.sock)
        except Exception:
            hello.sock.close()
            if not self._hub.is_closing:  # nothing is attached to a hub that is being closed
                report_exception()

    def _drop(self, hello: Hello) -> None:
        if self._strangers.get(hello.sock.fileno()) is hello:  # it hasn't become a connection
            del self._strangers[hello.sock.fileno()]
            self._hub.drop(hello.sock)
            hello.sock.close()

    def _displace(self) -> None:
        """Drop a stranger, any: the oldest may be one that is far away."""
        place = random.randrange(len(self._strangers))
        self._drop(next(islice(self._strangers.values(), place, None)))

    def _sweep(self) -> None:
        """Drop those that have been silent too long; come back while there are others."""
        oldest_allowed = time.monotonic() - HANDSHAKE_S
        for hello in list(self._strangers.values()):
            if hello.since > oldest_allowed:
                break
            self._drop(hello)
        self._sweeping = bool(self._strangers)
        if self._sweeping:
            self._hub.later(HANDSHAKE_S / 4, self._sweep)

    def _make_room(self) -> None:
        """No descriptor is free: drop a stranger, or let those that dial wait a moment."""
        if self._strangers:
            self._displace()
            return
        self._hub.look_for(self._sock, 0)
        self._hub.later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._hub.look_for(self._sock, select.EPOLLIN)


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
        sock = _listening(socket.AF_UNIX, f"\0{name}")
        address = f"unix:{name}"
    elif kind == "tcp":
        sock = listening_within(bind or host, ports, what)
        address = f"{'tcp' if context is None else 'tls'}:{host}:{sock.getsockname()[1]}"
    else:
        raise ValueError(f"no kind of address is called {kind!r}: use 'unix' or 'tcp'")
    sock.setblocking(False)
    return Listener(sock, address, context)


def listening_within(host: str, ports: tuple[int, int] | None, what: str) -> socket.socket:
    """Return a TCP socket that listens, at some port.

    Args:
        host: The address to listen on.
        ports: The first and the last of those that may be taken; None for any that is free.
        what: What needs the port, for the error: "the keeper of a slot".

    Raises:
        OSError: No port of these is free; or it can't be listened there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ports is None:
        return _listening(family, (host, 0))
    first, last = ports
    for port in range(first, last + 1):
        try:
            return _listening(family, (host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"no port of {first}-{last} is free on {host} for {what}: give more of them (connect(..., ports=...)), or end "
        "what has them (`ss -tlnp` lists it)",
    )


def _listening(family: int, name: Any) -> socket.socket:
    sock = track_socket(socket.socket(family))
    try:
        if family != socket.AF_UNIX and name[1] != 0:  # otherwise a port is chosen that is nobody's
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(name)
        # The connections inherit it, and so don't keep the address taken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
