"""A hub's door: a listener and the connections that are still proving who they are."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from colocate._system.jobs import report_exception
from colocate._system.limits import HANDSHAKE_S, UNDISTURBED_S
from colocate.errors import ClosedError
from colocate.wire._listening import NO_ROOM, REOPEN_EVERY_S
from colocate.wire.auth import Listener
from colocate.wire.handshake import Handshake

# When so many strangers wait, the oldest go earlier; each has UNDISTURBED_S, unless there are very many, or too many
# for the descriptors of this process.
_HANDSHAKES = 64
_MOST_STRANGERS = 512
# Those that have knocked are kept; so many at once, then the next one has to come again.
_MOST_KNOWN = 1024
_ACCEPTS = 16
# How long a listener pauses when the process has no free descriptor.
_PAUSE_S = 0.1
_REOPENS = 1000  # so often is tried to listen again


class Server(Protocol):
    """What a door needs of the hub that serves it."""

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


class Door:
    """A listener and the connections that are still proving who they are."""

    def __init__(self, hub: Server, listener: Listener, key: bytes, on_accept: Callable[[socket.socket], None]) -> None:
        self._hub = hub
        self._listener = listener
        self._key = key
        self._on_accept = on_accept
        # Both by age: who hasn't knocked yet, and who has.
        self._strangers: dict[int, Handshake] = {}
        self._known: dict[int, Handshake] = {}
        self._most = min(_MOST_STRANGERS, max(_HANDSHAKES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._sweeping = False
        self._thinning = False

    def on_events(self, events: int) -> None:
        """Let in who has come."""
        if events & select.EPOLLHUP:
            self._reopen()
            return
        for _ in range(_ACCEPTS):
            try:
                sock = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_ROOM:
                    self._make_room()
                    return
                continue  # That connection has gone again.
            if sock is not None:
                self._greet(sock)

    def _reopen(self, tries: int = _REOPENS) -> None:
        """It was shut down from outside: it would be readable for ever, and nobody would get in."""
        self._hub.drop(self._listener._sock)
        try:
            self._listener.reopen()
        except OSError:  # whoever shut it down may still have a copy of it
            if tries:
                self._hub.later(REOPEN_EVERY_S, partial(self._reopen, tries - 1))
            else:
                report_exception()  # who dials is refused from now on
            return
        with contextlib.suppress(ClosedError):  # just now
            self._hub.serve(self._listener.fileno(), self.on_events)

    def close(self) -> None:
        """Close the listener, and what hasn't become a connection."""
        for handshake in [*self._strangers.values(), *self._known.values()]:
            self._drop(handshake)
        self._hub.drop(self._listener._sock)
        self._listener.close()

    def _greet(self, sock: socket.socket) -> None:
        if len(self._strangers) >= self._most:
            self._turn_away(next(iter(self._strangers.values())))
        try:
            handshake = self._listener.handshake(sock, self._key)
        except OSError:
            sock.close()
            return
        if len(self._known) >= _MOST_KNOWN:
            handshake.turn_away()
            handshake.sock.close()
            return
        try:
            self._hub.serve(handshake.sock.fileno(), lambda _events: self._advance(handshake))
        except ClosedError:  # just now
            handshake.sock.close()
            return
        self._strangers[handshake.sock.fileno()] = handshake
        if not self._sweeping:
            self._sweep()
        if len(self._strangers) > _HANDSHAKES and not self._thinning:
            self._thin()

    def _advance(self, handshake: Handshake) -> None:
        try:
            authenticated = handshake.advance()
        except BlockingIOError:
            self._hub.look_for(handshake.sock, handshake.waits_for)
            return
        except OSError:
            self._drop(handshake)
            return
        sock = handshake.sock
        if handshake.knocked and self._strangers.pop(sock.fileno(), None) is not None:
            self._known[sock.fileno()] = handshake
        if not authenticated:
            return
        del self._known[sock.fileno()]
        self._hub.drop(sock)
        try:
            self._on_accept(sock)
        except Exception:
            sock.close()
            if not self._hub.is_closing:  # nothing is attached to a hub that is being closed
                report_exception()

    def _drop(self, handshake: Handshake) -> None:
        """Unless it has become a connection."""
        sock = handshake.sock
        for waiting in (self._strangers, self._known):
            if waiting.get(sock.fileno()) is handshake:
                del waiting[sock.fileno()]
                self._hub.drop(sock)
                sock.close()
                return

    def _turn_away(self, stranger: Handshake) -> None:
        stranger.turn_away()
        self._drop(stranger)

    def _sweep(self) -> None:
        """Drop those that have been silent too long; come back while there are others."""
        oldest_allowed = time.monotonic() - HANDSHAKE_S
        for waiting in (self._strangers, self._known):
            for handshake in list(waiting.values()):
                if handshake.since > oldest_allowed:
                    break
                self._drop(handshake)
        self._sweeping = bool(self._strangers or self._known)
        if self._sweeping:
            self._hub.later(HANDSHAKE_S / 4, self._sweep)

    def _thin(self) -> None:
        """Turn away the oldest strangers of too many that have had their time; come back while there are too many."""
        while self._thinning and len(self._strangers) > _HANDSHAKES:
            oldest = next(iter(self._strangers.values()))
            if oldest.since > time.monotonic() - UNDISTURBED_S:
                break
            self._turn_away(oldest)
        self._thinning = len(self._strangers) > _HANDSHAKES
        if self._thinning:
            self._hub.later(UNDISTURBED_S / 4, self._thin)

    def _make_room(self) -> None:
        """No descriptor is free: drop the oldest stranger, or let those that dial wait a moment."""
        if self._strangers:
            self._turn_away(next(iter(self._strangers.values())))
            return
        self._hub.look_for(self._listener._sock, 0)
        self._hub.later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._hub.look_for(self._listener._sock, select.EPOLLIN)
