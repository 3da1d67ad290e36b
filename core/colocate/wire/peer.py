"""Send requests from worker to worker, and wait for the answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TypeAlias

from colocate._definitions.packed import Packed
from colocate._system.jobs import format_error, report_exception
from colocate._system.limits import PEER_CONNECTS_WITHIN_S
from colocate._system.threads import Thread
from colocate.errors import ClosedError, ColocateError, ForkedError
from colocate.wire._forks import track
from colocate.wire.arriving import IncomingBody, OpenBuffer
from colocate.wire.event_loop import EventLoop, listen_everywhere
from colocate.wire.framing import FileBody, Frame, Head, Message, Reader, encode
from colocate.wire.hello import connect_with_retry, dial, prove
from colocate.wire.tls import Tls

Handler: TypeAlias = Callable[[Head], tuple[Head, Packed | FileBody | IncomingBody | None]]

_SCRATCH_BYTES = 16 << 10


class PeerChannel:
    """Sends requests to other processes, and answers requests of other processes.

    Every connection is authenticated, and carries one request at a time: threads with requests to one peer use separate
    connections, so that no answer delays another. Idle connections are reused.
    """

    def __init__(
        self,
        key: bytes,
        handler: Handler,
        host: str | None = None,
        tls: Tls | None = None,
        ports: tuple[int, int] | None = None,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create a channel. Sockets and threads are created on first use.

        Args:
            key: The secret of all peers.
            handler: Returns head and body of the answer to a request's head; runs on a thread per connection, and
                may block.
            host: The address of this machine to listen on in addition, for peers on other machines.
            tls: Certificates for connections with those peers.
            ports: The first and last allowed port for those peers; None for any.
            on_death: Called with the reason if an exception has ended the accepting thread.
        """
        self._on_death = on_death
        self._key = key
        self._handler = handler
        self._host = host
        self._tls = tls
        self._ports = ports
        self._lock = threading.Lock()
        self._event_loop: EventLoop | None = None
        self._address = ""
        self._idle: dict[str, list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._serving: dict[threading.Thread, _Connection] = {}
        self._closed = False
        self.aborts = 0  # Number of calls of `abort`.
        self._pid = os.getpid()
        track(self)

    @property
    def address(self) -> str:
        """The address of this channel. The first use opens the listeners.

        Raises:
            OSError: No descriptor is free.
            RuntimeError: No thread can be started.
        """
        with self._lock:
            self._check_usable(self.aborts)
            if self._event_loop is None:
                listeners = listen_everywhere(self._host, self._tls, ports=self._ports, what="what other workers fetch")
                event_loop = EventLoop("peer", on_death=self._on_death)
                try:
                    for listener in listeners:
                        event_loop.listen(listener, self._key, self._accept)
                except BaseException:  # The next use tries again, for example if no thread could start.
                    event_loop.close()
                    raise
                self._event_loop = event_loop
                self._address = ",".join(listener.address for listener in listeners)
            return self._address

    def request(
        self, address: str, head: Head, aborts: int | None = None, arrives: OpenBuffer | None = None
    ) -> Message:
        """Send a request to a peer, and wait for the answer, without a timeout.

        Args:
            address: The peer's address.
            head: The request.
            aborts: The value of `aborts` when the caller last knew that requests were allowed; a later `abort` ends
                this request, too.
            arrives: Chooses the destination of a long answer.

        Returns:
            The answer's head and body.

        Raises:
            ConnectionError: The peer is gone, doesn't know the key, or failed to answer; or `abort` was called.
        """
        frame = encode(head)
        connection = self._get_connection(address, self.aborts if aborts is None else aborts)
        keep = False
        try:
            with suppress(OSError):  # A peer that has closed may have sent a reason before.
                connection.send(frame)
            open_answer = None if arrives is None else lambda head, *body: arrives(head[1:], *body)
            (fine, *answer), body = connection.receive(open_answer)
            keep = fine  # A peer that refuses may be about to close the connection.
        except (EOFError, OSError, ValueError) as error:
            reason = connection.aborted or f"the connection ended before it answered ({error})"
            raise ConnectionError(f"asking the peer at {address}: {reason}") from error
        finally:
            self._release_connection(connection, keep)
        if not fine:
            raise ConnectionError(f"the peer at {address} could not answer: {answer[0]}")
        return tuple(answer), body

    def abort(self, reason: str) -> None:
        """Fail all waiting requests. Later requests use new connections.

        Args:
            reason: The text of their `ConnectionError`.
        """
        with self._lock:
            self.aborts += 1
            for connection in self._busy:
                connection.abort(reason)
            self._close_idle()

    def close(self, timeout: float = 5.0) -> None:
        """Close all connections, and end all threads. Idempotent.

        Args:
            timeout: Seconds to wait for running handlers.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            event_loop, self._event_loop = self._event_loop, None
        if event_loop is not None:
            event_loop.close()  # This doesn't wait for handlers, which run on other threads.
        with self._lock:
            self._close_idle()
            for connection in (*self._busy, *self._serving.values()):
                connection.abort("the channel was closed")
            threads = list(self._serving)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))

    def close_after_fork(self) -> None:
        """Refuse further use in a forked child, where all tracked sockets are closed."""
        self._lock = threading.Lock()
        self._closed = True
        self._event_loop = None
        self._idle.clear()
        self._busy.clear()
        self._serving.clear()

    def __enter__(self) -> PeerChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self, aborts: int) -> None:
        if self._pid != os.getpid():
            raise ForkedError("a forked child can't use its parent's peer channel: ask from the process that made it")
        if self._closed:
            raise ClosedError("the peer channel is closed")
        if self.aborts != aborts:
            raise ConnectionError("the request was aborted before it was made")

    def _get_connection(self, address: str, aborts: int) -> _Connection:
        with self._lock:
            self._check_usable(aborts)
            idle = self._idle.get(address, [])
            while idle:
                connection = idle.pop()
                if connection.is_quiet():
                    self._busy.add(connection)
                    return connection
                connection.close()
        try:
            return connect_with_retry(partial(self._connect, address, aborts), PEER_CONNECTS_WITHIN_S)
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def _connect(self, address: str, aborts: int, left: Callable[[], float]) -> _Connection:
        connection = _Connection(dial(address, left(), self._tls), address)
        proved = False
        with self._lock:
            self._busy.add(connection)
        try:
            self._check_usable(aborts)
            prove(connection.sock, address, self._key, left())
            proved = True
        except OSError as error:
            if connection.aborted:
                raise ConnectionError(connection.aborted) from error
            raise
        finally:
            if not proved:
                self._release_connection(connection, keep=False)
        return connection

    def _release_connection(self, connection: _Connection, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if self._closed or connection.aborted or not keep:
                connection.close()
            else:
                self._idle.setdefault(connection.address, []).append(connection)

    def _close_idle(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    # -- the answering side

    def _accept(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        connection = _Connection(sock, "")
        thread = Thread(target=self._serve, args=(connection,), name="colocate-peer-serve")
        with self._lock:
            if self._closed:
                connection.close()
                return
            try:
                thread.start()
            except RuntimeError as error:
                connection.send(encode((False, format_error(error))))  # This is short enough for one send.
                connection.close()
                return
            self._serving[thread] = connection

    def _serve(self, connection: _Connection) -> None:
        try:
            while True:
                head, _body = connection.receive()
                with self._build_answer(head) as frame:
                    connection.send(frame)
        except (EOFError, OSError, ValueError):
            pass  # The peer has closed the connection, or this side is closing.
        finally:
            with self._lock:
                self._serving.pop(threading.current_thread(), None)
                connection.close()

    def _build_answer(self, head: Head) -> Frame:
        try:
            answer, body = self._handler(head)
            return encode((True, *answer), body)
        except BaseException as error:  # Packing users' values may raise any exception.
            if not isinstance(error, ColocateError):  # Errors of colocate are only sent to the peer.
                report_exception()
            return encode((False, format_error(error)))


class _Connection:
    """A blocking connection for one thread at a time. Only `abort` may be called on other threads."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.aborted: str | None = None
        self._passes_files = sock.family == socket.AF_UNIX
        self._reader = Reader(self._passes_files)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def send(self, frame: Frame) -> None:
        sending = frame.create_sender(self._passes_files)
        try:
            while not sending.write_to(self.sock):
                pass
        finally:
            sending.close()

    def receive(self, arrives: OpenBuffer | None = None) -> Message:
        """Wait for the next message; `arrives` chooses the destination of a long body."""
        self._reader.open_buffer = arrives
        while True:
            for message in self._reader.receive_messages(self.sock, self._scratch):
                return message  # A connection carries one message at a time.

    def is_quiet(self) -> bool:
        """Return whether the connection is open with nothing to read, as between two requests."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def abort(self, reason: str) -> None:
        """Wake the thread that waits on the connection. Safe on any thread."""
        self.aborted = self.aborted or reason
        with suppress(OSError):  # The socket may be closed already.
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._reader.close()
        self.sock.close()
