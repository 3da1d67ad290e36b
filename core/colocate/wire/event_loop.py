"""Run the input and output of any number of lanes and listeners on one thread (`EventLoop`)."""

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

from colocate._system.jobs import format_error, report_exception
from colocate._system.limits import HANDSHAKE_S
from colocate._system.threads import Thread
from colocate.errors import ClosedError
from colocate.wire._forks import track, track_socket
from colocate.wire.framing import SCRATCH_BYTES
from colocate.wire.hello import Handshake, is_own_user, tune_socket
from colocate.wire.lane import OnClosed, OnMessage, SocketLane
from colocate.wire.tls import Tls, get_secured, wrap_tls

if TYPE_CHECKING:
    import ssl

Kind: TypeAlias = Literal["unix", "tcp"]

LOOPBACK = "127.0.0.1"
_EVENTS = 256
_LOOKS_EVERY_S = 3600.0  # One poll waits at most this many seconds, because epoll's timeout is limited.
# This many connections may wait for `accept`, because many workers dial at once.
_BACKLOG = 1024
# A listener keeps at most this many unauthenticated connections; another connection then displaces a random one.
# Silent connections are displaced in the end, and peers with the key dial again.
_MOST_STRANGERS = 512
_ACCEPTS = 16
# A listener pauses for this many seconds if the process has no free descriptor.
_PAUSE_S = 0.1
# `accept` raises these errors if the process or the machine lacks descriptors or memory.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class EventLoop:
    """Serves lanes, listeners and other descriptors on one thread.

    All callbacks run on that thread, one at a time, and must not block. A callback that raises is reported
    (`threading.excepthook`); its lane is closed, or its descriptor no longer watched. If an exception ends the thread,
    all lanes end with that reason, and `on_death` is called.
    """

    def __init__(
        self, name: str, own_thread: bool = True, on_death: Callable[[str], None] = lambda reason: None
    ) -> None:
        """Create an event loop.

        Args:
            name: Name for the thread, `colocate-NAME`.
            own_thread: Whether to start a thread on first use; otherwise some thread calls `run`.
            on_death: Called on the thread with the reason, after all lanes have ended, if an exception has ended
                the thread.
        """
        self.name = name
        self._own_thread = own_thread
        self._on_death = on_death
        self._epoll = select.epoll()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for sock in (self._wake_receiver, self._wake_sender):
            track_socket(sock).setblocking(False)
        self._epoll.register(self._wake_receiver, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {self._wake_receiver.fileno(): self._on_wake}
        self._lanes: dict[int, SocketLane] = {}
        self._listeners: list[Listener] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_closing = False  # While closing, new descriptors are refused.
        self._ending = False
        self._ended = threading.Event()
        track(self)

    def start(self) -> None:
        """Start the event loop's thread now, instead of on first use.

        Raises:
            RuntimeError: No thread can be started.
        """
        with self._lock:
            self._start_thread()

    def attach(self, sock: socket.socket, on_message: OnMessage, on_closed: OnClosed) -> SocketLane:
        """Create a lane for a connected, authenticated socket, which the event loop owns from now on.

        Args:
            sock: The socket.
            on_message: Called with each message's head and body, in order, possibly before this returns.
            on_closed: Called once, last, with the reason.

        Returns:
            The lane.

        Raises:
            ClosedError: The event loop is closed.
        """
        track_socket(sock)
        sock.setblocking(False)
        tune_socket(sock)
        lane = SocketLane(self, sock, on_message, on_closed)
        with self._lock:
            self._register(sock.fileno(), lane._on_events)
            self._lanes[sock.fileno()] = lane
        if lane._secured is not None:  # TLS may have buffered data that the kernel doesn't report.
            self.call_later(0.0, partial(lane.receive, self.scratch))
        return lane

    def listen(self, listener: Listener, key: bytes, on_accept: Callable[[socket.socket], None]) -> None:
        """Accept connections that prove the key. The event loop owns the listener from now on.

        Unauthenticated connections are limited in time and number, and delay no other connection.

        Args:
            listener: The listener, from `listen`.
            key: The shared secret.
            on_accept: Called with each authenticated connection, which it owns.
        """
        listener._event_loop, listener._key, listener._on_accept = self, key, on_accept
        with self._lock:
            self._listeners.append(listener)
            self._register(listener.fileno(), listener._on_events)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call a function whenever a descriptor (say, of a log pipe) is readable. The caller still owns the descriptor.

        Args:
            fd: The descriptor.
            callback: Must read or unwatch, or is called again and again.
        """

        def on_events(_events: int) -> None:
            try:
                callback()
            except Exception:
                self.unwatch(fd)
                report_exception()

        self.add_handler(fd, on_events)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor, which the caller may then close. A running callback isn't awaited."""
        with self._lock:
            if self._handlers.pop(fd, None) is not None and not self._ended.is_set():
                self._epoll.unregister(fd)

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action on the event loop's thread after some seconds, unless the loop closes. Safe on any thread."""
        with self._lock:
            if self.is_closing:
                return
            self._start_thread()
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), action))
            if threading.current_thread() is not self._thread:
                self._wake()  # The thread may be in a longer wait.

    def run(self) -> None:
        """Serve on the calling thread until the event loop is closed. For loops with `own_thread=False`."""
        with self._lock:
            if self._thread is not None:
                raise RuntimeError(f"event loop {self.name!r} is served by {self._thread.name!r} already")
            self._thread = threading.current_thread()
        self._run_loop()

    def close(self, timeout: float | None = None) -> bool:
        """Close all lanes and listeners; each lane's `on_closed` is called. Idempotent.

        On the event loop's own thread this returns at once, and all is closed when the current callback has returned.

        Args:
            timeout: Seconds to wait for a running callback.

        Returns:
            Whether everything is closed.
        """
        with self._lock:
            self.is_closing = True
            thread = self._thread
            if not self._ended.is_set():
                self._wake()
        if thread is None:
            self._close_all()
        elif thread is not threading.current_thread():
            self._ended.wait(timeout)
            if self._own_thread and self._ended.is_set():
                thread.join()
        return self._ended.is_set()

    def close_after_fork(self) -> None:
        """Close all inherited descriptors in a forked child; the parent's connections stay open."""
        ended, self._ended = self._ended.is_set(), threading.Event()
        # Set first, because later steps may fail, and a `close` in the child must not wait for the parent's thread.
        self._ended.set()
        self.is_closing = self._ending = True
        self._lock = threading.Lock()
        if not ended:
            # Descriptors stay registered, because parent and child share one epoll.
            self._epoll.close()
            self._wake_receiver.close()
            self._wake_sender.close()
            for lane in list(self._lanes.values()):
                lane._close_after_fork()

    # -- for lanes and listeners

    def add_handler(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call a handler with the events of a descriptor from now on.

        Raises:
            ClosedError: The event loop is closed.
        """
        with self._lock:
            self._register(fd, handler)

    def set_events(self, sock: socket.socket, events: int) -> None:
        """Set the events to poll on a socket."""
        self._epoll.modify(sock, events)

    def remove_socket(self, sock: socket.socket) -> None:
        """Stop serving a socket, before the socket is closed."""
        with self._lock:
            self._lanes.pop(sock.fileno(), None)
            if self._handlers.pop(sock.fileno(), None) is not None:
                try:
                    self._epoll.unregister(sock)
                except OSError as error:
                    # Other code has closed the descriptor, which removes the registration.
                    if error.errno != errno.EBADF:
                        raise

    def _register(self, fd: int, handler: Callable[[int], None]) -> None:
        """Register a descriptor and a handler. The caller holds the lock."""
        if self.is_closing:
            raise ClosedError(f"event loop {self.name!r} is closed: it serves nothing any more")
        self._start_thread()
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def _start_thread(self) -> None:
        """Start the thread, unless the thread has started before.

        The lock is held. Raises RuntimeError if no thread can be started; the next use tries again.
        """
        if self._own_thread and self._thread is None:
            thread = Thread(target=self._run_loop, name=f"colocate-{self.name}")
            thread.start()
            self._thread = thread

    def _run_loop(self) -> None:
        try:
            while not self.is_closing:
                for fd, events in self._epoll.poll(self._run_due_timers(), _EVENTS):
                    # An earlier callback of this round may have dropped the descriptor.
                    if (handler := self._handlers.get(fd)) is not None:
                        handler(events)
                        del handler  # A waiting loop mustn't keep the handler alive.
        except BaseException as error:
            if not self._own_thread:  # The caller of `run` gets the exception.
                raise
            report_exception()
            reason = f"thread {threading.current_thread().name!r} was ended by {format_error(error)}"
            self._close_all(reason)
            _run_reporting(partial(self._on_death, reason))
        finally:
            self._close_all()

    def _run_due_timers(self) -> float:
        """Run all due timers; return the seconds until the next one, or -1 for none."""
        now = time.monotonic()  # Read once, so that timers which become due meanwhile run later.
        while self._timers:
            with self._lock:
                delay = self._timers[0][0] - now
                if delay > 0:
                    return max(0.0, min(self._timers[0][0] - time.monotonic(), _LOOKS_EVERY_S))
                action = heapq.heappop(self._timers)[2]
            _run_reporting(action)
        return -1

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # If the wake-up buffer is full, the thread will wake anyway.
            self._wake_sender.send(b"\0")

    def _on_wake(self, _events: int) -> None:
        with suppress(BlockingIOError):
            self._wake_receiver.recv_into(self.scratch)

    def _close_all(self, reason: str = "the event loop was closed") -> None:
        with self._lock:
            self.is_closing = True
            if self._ending:
                return
            self._ending = True
        for listener in self._listeners:
            _run_reporting(listener._close_all)
        for lane in list(self._lanes.values()):
            _run_reporting(partial(lane._finish, reason))
        with self._lock:
            self._ended.set()
            self._handlers.clear()
            self._epoll.close()
            self._wake_receiver.close()
            self._wake_sender.close()


def _run_reporting(job: Callable[[], object]) -> None:
    try:
        job()
    except Exception:
        report_exception()


class Listener:
    """A listening socket and the accepted connections that aren't authenticated yet, for `EventLoop.listen`.

    Attributes:
        address: The address for `connect`.
    """

    _event_loop: EventLoop
    _key: bytes
    _on_accept: Callable[[socket.socket], None]

    def __init__(self, sock: socket.socket, address: str, context: ssl.SSLContext | None = None) -> None:
        self._sock = sock
        self._context = context
        self.address = address
        self._strangers: dict[int, Handshake] = {}  # Unauthenticated connections by descriptor, oldest first.
        self._stranger_limit = min(_MOST_STRANGERS, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._sweeping = False

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 if the socket is closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Stop listening, so that nobody can connect to the address any more."""
        self._sock.close()

    def _close_all(self) -> None:
        for hello in list(self._strangers.values()):
            self._drop_stranger(hello)
        if self._sock.fileno() >= 0:
            self._event_loop.remove_socket(self._sock)
        self.close()

    def _on_events(self, events: int) -> None:
        if events & select.EPOLLHUP:  # Other code has shut the socket down, so refuse further connections.
            self._close_all()
            return
        for _ in range(_ACCEPTS):
            try:
                sock = track_socket(self._sock.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # The peer has already closed the connection.
                if self._strangers:
                    self._displace()
                else:  # Pause; new connections wait in the backlog until `_resume`.
                    self._event_loop.set_events(self._sock, 0)
                    self._event_loop.call_later(_PAUSE_S, self._resume)
                return
            if not is_own_user(sock):
                sock.close()
                continue
            if len(self._strangers) >= self._stranger_limit:
                self._displace()
            try:
                sock.setblocking(False)
                tune_socket(sock)
                if self._context is not None:
                    sock = wrap_tls(sock, self._context, server=True)
                hello = Handshake(sock, self._key)
                self._event_loop.add_handler(sock.fileno(), partial(self._advance, hello))
            except (OSError, ValueError, ClosedError):  # The peer has closed, or the event loop is closing.
                sock.close()
                continue
            self._strangers[sock.fileno()] = hello
            if not self._sweeping:
                self._sweep()
            self._advance(hello)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._event_loop.set_events(self._sock, select.EPOLLIN)

    def _advance(self, hello: Handshake, _events: int = 0) -> None:
        try:
            hello.advance()
        except BlockingIOError:
            if (through := get_secured(hello.sock)) is not None:
                self._event_loop.set_events(hello.sock, select.EPOLLOUT if through.wants_write else select.EPOLLIN)
            return
        except OSError:
            self._drop_stranger(hello)
            return
        del self._strangers[hello.sock.fileno()]
        self._event_loop.remove_socket(hello.sock)
        try:
            self._on_accept(hello.sock)
        except Exception:
            hello.sock.close()
            if not self._event_loop.is_closing:  # An error is expected while the event loop is closing.
                report_exception()

    def _drop_stranger(self, hello: Handshake) -> None:
        if self._strangers.get(hello.sock.fileno()) is hello:  # The connection isn't authenticated yet.
            del self._strangers[hello.sock.fileno()]
            self._event_loop.remove_socket(hello.sock)
            hello.sock.close()

    def _displace(self) -> None:
        """Drop a random unauthenticated connection, because the peer of the oldest connection may just be far away."""
        place = random.randrange(len(self._strangers))
        self._drop_stranger(next(islice(self._strangers.values(), place, None)))

    def _sweep(self) -> None:
        """Drop connections that haven't authenticated for too long; repeat while unauthenticated connections remain."""
        oldest_allowed = time.monotonic() - HANDSHAKE_S
        for hello in list(self._strangers.values()):
            if hello.since > oldest_allowed:
                break
            self._drop_stranger(hello)
        self._sweeping = bool(self._strangers)
        if self._sweeping:
            self._event_loop.call_later(HANDSHAKE_S / 4, self._sweep)


def listen_everywhere(
    host: str | None,
    tls: Tls | None = None,
    *,
    bind: str | None = None,
    ports: tuple[int, int] | None = None,
    what: str = "a listener",
) -> list[Listener]:
    """Open a listener for this machine and, if `host` is given, a second listener for other machines.

    Returns:
        The listeners; their addresses, joined by commas, are one address for peers.
    """
    # The TCP listener comes first, because opening a port may raise.
    remote = [] if host is None else [listen("tcp", host, tls, bind=bind, ports=ports, what=what)]
    return [listen("unix"), *remote]


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
        kind: `"unix"` (for this machine only, and faster: large memory is passed, not copied) or `"tcp"`.
        host: With `"tcp"`: the address of this machine for peers; loopback for this machine only.
        tls: With `"tcp"`: certificates to encrypt connections.
        bind: With `"tcp"`: the address to listen on, if different from `host`; "0.0.0.0" for all.
        ports: With `"tcp"`: the first and last allowed port; None for any free port.
        what: The purpose of the port, for the error if none is free.

    Returns:
        The listener.

    Raises:
        OSError: The address can't be used, or no allowed port is free.
    """
    context = None if tls is None else tls.context(server=True)
    if kind == "unix":
        name = f"colocate-{secrets.token_hex(16)}"
        sock = _open_socket(socket.AF_UNIX, f"\0{name}")
        address = f"unix:{name}"
    elif kind == "tcp":
        sock = listen_in_range(bind or host, ports, what)
        address = f"{'tcp' if context is None else 'tls'}:{host}:{sock.getsockname()[1]}"
    else:
        raise ValueError(f"no kind of address is called {kind!r}: use 'unix' or 'tcp'")
    sock.setblocking(False)
    return Listener(sock, address, context)


def listen_in_range(host: str, ports: tuple[int, int] | None, what: str) -> socket.socket:
    """Return a listening TCP socket on an allowed port.

    Args:
        host: The address to listen on.
        ports: The first and last allowed port; None for any free port.
        what: The purpose of the port, for the error: "the keeper of a slot".

    Raises:
        OSError: No allowed port is free, or the address can't be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ports is None:
        return _open_socket(family, (host, 0))
    first, last = ports
    for port in range(first, last + 1):
        try:
            return _open_socket(family, (host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"no port of {first}-{last} is free on {host} for {what}: give more of them (connect(..., ports=...)), or end "
        "what has them (`ss -tlnp` lists it)",
    )


def _open_socket(family: int, name: Any) -> socket.socket:
    sock = track_socket(socket.socket(family))
    try:
        if family != socket.AF_UNIX and name[1] != 0:  # For port 0 the kernel chooses a free port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(name)
        # Accepted connections inherit this option, so that open connections don't block the address later.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
