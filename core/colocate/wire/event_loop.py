"""An event loop: one thread that does the input and output of any number of lanes, and lets others in at listeners."""

from __future__ import annotations

import errno
import heapq
import itertools
import random
import resource
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from colocate._system.jobs import error_text, report_exception
from colocate._system.limits import HANDSHAKE_S
from colocate._system.threads import Thread
from colocate.errors import ClosedError
from colocate.wire._forks import track, track_socket
from colocate.wire.framing import SCRATCH_BYTES
from colocate.wire.hello import Hello, is_own_user, tune
from colocate.wire.lane import OnClosed, OnMessage, SocketLane
from colocate.wire.tls import Tls, encrypted, secured

if TYPE_CHECKING:
    import ssl

Kind: TypeAlias = Literal["unix", "tcp"]

LOOPBACK = "127.0.0.1"
_EVENTS = 256
_LOOKS_EVERY_S = 3600.0  # epoll takes no month
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


class EventLoop:
    """Serves lanes, listeners and any other descriptors on one thread.

    All callbacks run on that thread, one at a time: they must not block. One that raises is reported
    (`threading.excepthook`); its lane is closed, its descriptor no longer watched. Should an exception end the thread
    all the same, all lanes end with that as their reason, and `on_death` is told.
    """

    def __init__(
        self, name: str, own_thread: bool = True, on_death: Callable[[str], None] = lambda reason: None
    ) -> None:
        """Make an event loop.

        Args:
            name: Its thread is called `colocate-NAME`.
            own_thread: False: nothing happens until some thread calls `run`.
            on_death: Called on its thread, once its lanes have ended, when an exception has ended it: nothing of what
                was given to it will happen, and whoever waits for that is to be told the reason.
        """
        self.name = name
        self._own_thread = own_thread
        self._on_death = on_death
        self._epoll = select.epoll()
        self._woken, self._waker = socket.socketpair()
        for sock in (self._woken, self._waker):
            track_socket(sock).setblocking(False)
        self._epoll.register(self._woken, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {self._woken.fileno(): self._on_wake}
        self._lanes: dict[int, SocketLane] = {}
        self._listeners: list[Listener] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_closing = False  # it serves nothing new
        self._ending = False
        self._ended = threading.Event()
        track(self)

    def start(self) -> None:
        """Start its thread now, instead of with the first use.

        Raises:
            RuntimeError: No thread can be started.
        """
        with self._lock:
            self._start()

    def attach(self, sock: socket.socket, on_message: OnMessage, on_closed: OnClosed) -> SocketLane:
        """Make a lane of a connected, authenticated socket, which is the event loop's from now on.

        Args:
            sock: The socket.
            on_message: Gets each message's head and body, in order; may be called before this returns.
            on_closed: Called once, last, with the reason.

        Returns:
            The lane.
        """
        track_socket(sock)
        sock.setblocking(False)
        tune(sock)
        lane = SocketLane(self, sock, on_message, on_closed)
        with self._lock:
            self._register(sock.fileno(), lane._on_events)
            self._lanes[sock.fileno()] = lane
        if lane._secured is not None:  # it may have more than the kernel knows of
            self.later(0.0, partial(lane.receive, self.scratch))
        return lane

    def listen(self, listener: Listener, key: bytes, on_accept: Callable[[socket.socket], None]) -> None:
        """Accept connections that know the key; the listener is the event loop's from now on.

        Strangers are given a bounded time and number; they hold up nobody.

        Args:
            listener: What `listen` gave.
            key: The secret that both sides know.
            on_accept: Gets each authenticated connection, and owns it.
        """
        listener._event_loop, listener._key, listener._on_accept = self, key, on_accept
        with self._lock:
            self._listeners.append(listener)
            self._register(listener.fileno(), listener._on_events)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever a descriptor is readable (a log pipe, a pidfd); it stays the caller's.

        Args:
            fd: The descriptor.
            callback: Must read, or unwatch; otherwise it is called again and again.
        """

        def on_events(_events: int) -> None:
            try:
                callback()
            except Exception:
                self.unwatch(fd)
                report_exception()

        self.serve(fd, on_events)

    def unwatch(self, fd: int) -> None:
        """Watch no longer; from another thread, a callback may still be under way. Before closing the descriptor."""
        with self._lock:
            if self._handlers.pop(fd, None) is not None and not self._ended.is_set():
                self._epoll.unregister(fd)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action on the event loop's thread after some time; from any thread. Dropped when that is closed."""
        with self._lock:
            if self.is_closing:
                return
            self._start()
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), action))
            if threading.current_thread() is not self._thread:
                self._wake()  # it may be waiting for longer than that

    def run(self) -> None:
        """Serve on the calling thread until the event loop is closed (`own_thread=False`)."""
        with self._lock:
            if self._thread is not None:
                raise RuntimeError(f"event loop {self.name!r} is served by {self._thread.name!r} already")
            self._thread = threading.current_thread()
        self._serve()

    def close(self, timeout: float | None = None) -> bool:
        """Close everything; each lane's `on_closed` is called. Idempotent.

        On the event loop's own thread this returns at once, and all is closed when the current callback has returned.

        Args:
            timeout: How long to wait for a callback that is under way.

        Returns:
            Whether everything is closed.
        """
        with self._lock:
            self.is_closing = True
            thread = self._thread
            if not self._ended.is_set():
                self._wake()
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            self._ended.wait(timeout)
            if self._own_thread and self._ended.is_set():
                thread.join()
        return self._ended.is_set()

    def forget(self) -> None:
        """In a forked child: close what was inherited; the parent's connections stay as they are."""
        ended, self._ended = self._ended.is_set(), threading.Event()
        self._ended.set()  # before anything that may fail: whoever closes it here mustn't wait for the parent's thread
        self.is_closing = self._ending = True
        self._lock = threading.Lock()
        if not ended:
            # Not unregister: the child's epoll is the parent's.
            self._epoll.close()
            self._woken.close()
            self._waker.close()
            for lane in list(self._lanes.values()):
                lane._forget_fork()

    # -- for lanes and listeners

    def serve(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call back with the events of this descriptor from now on.

        Raises:
            ClosedError: The event loop is closed.
        """
        with self._lock:
            self._register(fd, handler)

    def look_for(self, sock: socket.socket, events: int) -> None:
        """Look for these events of this socket from now on."""
        self._epoll.modify(sock, events)

    def drop(self, sock: socket.socket) -> None:
        """Serve this socket no longer (before it is closed)."""
        with self._lock:
            self._lanes.pop(sock.fileno(), None)
            if self._handlers.pop(sock.fileno(), None) is not None:
                try:
                    self._epoll.unregister(sock)
                except OSError as error:
                    if error.errno != errno.EBADF:  # whoever closed the descriptor has taken it off the list
                        raise

    def _register(self, fd: int, handler: Callable[[int], None]) -> None:
        """With the lock held."""
        if self.is_closing:
            raise ClosedError(f"event loop {self.name!r} is closed: it serves nothing any more")
        self._start()
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def _start(self) -> None:
        """With the lock held. Raises RuntimeError when no thread can be started; the next use tries it again."""
        if self._own_thread and self._thread is None:
            thread = Thread(target=self._serve, name=f"colocate-{self.name}")
            thread.start()
            self._thread = thread

    def _serve(self) -> None:
        try:
            while not self.is_closing:
                for fd, events in self._epoll.poll(self._patience(), _EVENTS):
                    # An earlier callback of this round may have dropped it.
                    if (handler := self._handlers.get(fd)) is not None:
                        handler(events)
                        del handler  # with what it holds
        except BaseException as error:
            if not self._own_thread:  # it is its caller's, who sees the exception
                raise
            report_exception()
            reason = f"thread {threading.current_thread().name!r} was ended by {error_text(error)}"
            self._end(reason)
            _try(partial(self._on_death, reason))
        finally:
            self._end()

    def _patience(self) -> float:
        """Run what is due by now; return how long until the next is."""
        now = time.monotonic()  # what becomes due while these run comes after what descriptors have
        while self._timers:
            with self._lock:
                left = self._timers[0][0] - now
                if left > 0:
                    return max(0.0, min(self._timers[0][0] - time.monotonic(), _LOOKS_EVERY_S))
                action = heapq.heappop(self._timers)[2]
            _try(action)
        return -1

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it has been woken so often that it hasn't come to that yet
            self._waker.send(b"\0")

    def _on_wake(self, _events: int) -> None:
        with suppress(BlockingIOError):
            self._woken.recv_into(self.scratch)

    def _end(self, reason: str = "the event loop was closed") -> None:
        with self._lock:
            self.is_closing = True
            if self._ending:
                return
            self._ending = True
        for listener in self._listeners:
            _try(listener._end)
        for lane in list(self._lanes.values()):
            _try(partial(lane._finish, reason))
        with self._lock:
            self._ended.set()
            self._handlers.clear()
            self._epoll.close()
            self._woken.close()
            self._waker.close()


def _try(job: Callable[[], object]) -> None:
    """Do one thing of many: what it raises is reported, and the others are done as well."""
    try:
        job()
    except Exception:
        report_exception()


class Listener:
    """A listening socket, with the connections to it that are still proving who they are; `EventLoop.listen` serves it.

    Attributes:
        address: What others pass to `connect`.
    """

    _event_loop: EventLoop
    _key: bytes
    _on_accept: Callable[[socket.socket], None]

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

    def _end(self) -> None:
        """Close the socket, and what hasn't become a connection."""
        for hello in list(self._strangers.values()):
            self._drop(hello)
        if self._sock.fileno() >= 0:
            self._event_loop.drop(self._sock)
        self.close()

    def _on_events(self, events: int) -> None:
        """Let in who has come."""
        if events & select.EPOLLHUP:  # it was shut down from outside: who dials is refused from now on
            self._end()
            return
        for _ in range(_ACCEPTS):
            try:
                sock = track_socket(self._sock.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # That connection has gone again.
                if self._strangers:
                    self._displace()
                else:  # those that dial wait a moment
                    self._event_loop.look_for(self._sock, 0)
                    self._event_loop.later(_PAUSE_S, self._resume)
                return
            if not is_own_user(sock):
                sock.close()
                continue
            if len(self._strangers) >= self._most:
                self._displace()
            try:
                sock.setblocking(False)
                tune(sock)
                if self._context is not None:
                    sock = encrypted(sock, self._context, server=True)
                hello = Hello(sock, self._key)
                self._event_loop.serve(sock.fileno(), partial(self._advance, hello))
            except (OSError, ValueError, ClosedError):  # it has gone, or the event loop is being closed
                sock.close()
                continue
            self._strangers[sock.fileno()] = hello
            if not self._sweeping:
                self._sweep()
            self._advance(hello)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._event_loop.look_for(self._sock, select.EPOLLIN)

    def _advance(self, hello: Hello, _events: int = 0) -> None:
        try:
            hello.advance()
        except BlockingIOError:
            if (through := secured(hello.sock)) is not None:
                self._event_loop.look_for(hello.sock, select.EPOLLOUT if through.wants_write else select.EPOLLIN)
            return
        except OSError:
            self._drop(hello)
            return
        del self._strangers[hello.sock.fileno()]
        self._event_loop.drop(hello.sock)
        try:
            self._on_accept(hello.sock)
        except Exception:
            hello.sock.close()
            if not self._event_loop.is_closing:  # nothing is attached to an event loop that is being closed
                report_exception()

    def _drop(self, hello: Hello) -> None:
        if self._strangers.get(hello.sock.fileno()) is hello:  # it hasn't become a connection
            del self._strangers[hello.sock.fileno()]
            self._event_loop.drop(hello.sock)
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
            self._event_loop.later(HANDSHAKE_S / 4, self._sweep)


def listen_widely(
    host: str | None,
    tls: Tls | None = None,
    *,
    bind: str | None = None,
    ports: tuple[int, int] | None = None,
    what: str = "a listener",
) -> list[Listener]:
    """Open what others on this machine reach and, with a host, what those on other machines do; see `listen`.

    Returns:
        The listeners; an address for all of them is theirs, joined by commas.
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
