"""A hub: one thread that does the input and output of any number of lanes."""

from __future__ import annotations

import errno
import heapq
import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from colocate._system.jobs import error_text, report_exception
from colocate.errors import ClosedError
from colocate.wire._forks import track, track_socket
from colocate.wire.framing import SCRATCH_BYTES
from colocate.wire.hello import tune
from colocate.wire.lane import OnClosed, OnMessage, SocketLane
from colocate.wire.listener import Listener
from colocate.wire.tls import secured

_EVENTS = 256
_LOOKS_EVERY_S = 3600.0  # epoll takes no month


class Hub:
    """Serves lanes, listeners and any other descriptors on one thread.

    All callbacks run on that thread, one at a time: they must not block. One that raises is reported
    (`threading.excepthook`); its lane is closed, its descriptor no longer watched. Should an exception end the thread
    all the same, all lanes end with that as their reason, and `on_death` is told.
    """

    def __init__(
        self, name: str, own_thread: bool = True, on_death: Callable[[str], None] = lambda reason: None
    ) -> None:
        """Make a hub.

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
        # Sockets, and no eventfd: a step may be under way when the hub is closed, and the number somebody else's then.
        self._woken, self._waker = socket.socketpair()
        for sock in (self._woken, self._waker):
            track_socket(sock).setblocking(False)
        self.jobs: deque[Callable[[], object]] = deque()
        self.wake = partial(self._waker.send, b"\0")
        self._epoll.register(self._woken, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {self._woken.fileno(): self._on_wake}
        self._lanes: dict[int, SocketLane] = {}
        self._listeners: list[Listener] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
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
        """Make a lane of a connected, authenticated socket, which is the hub's from now on.

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
        if secured(sock) is not None:  # it may have more than the kernel knows of
            self.later(0.0, partial(lane.receive, self.scratch))
        return lane

    def listen(self, listener: Listener, key: bytes, on_accept: Callable[[socket.socket], None]) -> None:
        """Accept connections that know the key; the listener is the hub's from now on.

        Strangers are given a bounded time and number; they hold up nobody.

        Args:
            listener: What `listen` gave.
            key: The secret that both sides know.
            on_accept: Gets each authenticated connection, and owns it.
        """
        listener.begin(self, key, on_accept)
        with self._lock:
            self._listeners.append(listener)
            self._register(listener.fileno(), listener.on_events)

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

        with self._lock:
            self._register(fd, on_events)

    def unwatch(self, fd: int) -> None:
        """Watch no longer; from another thread, a callback may still be under way. Before closing the descriptor."""
        with self._lock:
            if self._handlers.pop(fd, None) is not None and not self._ended.is_set():
                self._epoll.unregister(fd)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action on the hub's thread after some time; from any thread. Dropped when the hub is closed."""
        with self._lock:
            if self._stopping:
                return
            self._start()
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), action))
            if threading.current_thread() is not self._thread:
                self._wake()  # it may be waiting for longer than that

    def run(self) -> None:
        """Serve on the calling thread until the hub is closed (`own_thread=False`)."""
        with self._lock:
            if self._thread is not None:
                raise RuntimeError(f"hub {self.name!r} is served by {self._thread.name!r} already")
            self._thread = threading.current_thread()
        self._serve()

    def close(self, timeout: float | None = None) -> bool:
        """Close everything; each lane's `on_closed` is called. Idempotent.

        On the hub's own thread this returns at once, and all is closed when the current callback has returned.

        Args:
            timeout: How long to wait for a callback that is under way.

        Returns:
            Whether everything is closed.
        """
        with self._lock:
            self._stopping = True
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
        self._stopping = self._ending = True
        self._lock = threading.Lock()
        if not ended:
            # Not unregister: the child's epoll is the parent's.
            self._epoll.close()
            self._woken.close()
            self._waker.close()
            for lane in list(self._lanes.values()):
                lane._forget_fork()

    # For lanes and listeners:

    @property
    def is_closing(self) -> bool:
        """Whether it serves nothing new."""
        return self._stopping

    def serve(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call back with the events of this descriptor from now on.

        Raises:
            ClosedError: The hub is closed.
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
        if self._stopping:
            raise ClosedError(f"hub {self.name!r} is closed: it serves nothing any more")
        self._start()
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def _start(self) -> None:
        """With the lock held. Raises RuntimeError when no thread can be started; the next use tries it again."""
        if self._own_thread and self._thread is None:
            thread = threading.Thread(target=self._serve, name=f"colocate-{self.name}", daemon=True)
            thread.start()
            self._thread = thread

    def _serve(self) -> None:
        try:
            while not self._stopping:
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
        """Run what is due; how long until the next is."""
        while self._timers:
            with self._lock:
                left = self._timers[0][0] - time.monotonic()
                if left > 0:
                    return min(left, _LOOKS_EVERY_S)
                action = heapq.heappop(self._timers)[2]
            try:
                action()
            except Exception:
                report_exception()
        return -1

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it has been woken so often that it hasn't come to that yet
            self.wake()

    def _on_wake(self, _events: int) -> None:
        with suppress(BlockingIOError):
            self._woken.recv_into(self.scratch)
        while self.jobs:
            _try(self.jobs.popleft())

    def _end(self, reason: str = "the hub was closed") -> None:
        with self._lock:
            self._stopping = True
            if self._ending:
                return
            self._ending = True
        for listener in self._listeners:
            _try(listener.end)
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
