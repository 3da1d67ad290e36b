"""Define lanes: connections that carry messages both ways, in order, on which sending never blocks."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from colocate._definitions.packed import Packed
from colocate._system.deadline import Deadline
from colocate._system.jobs import report_exception
from colocate._system.readable import readable
from colocate.wire.arriving import OpenBuffer
from colocate.wire.framing import Frame, Head, Reader, Sender, SmallSender, encode
from colocate.wire.tls import get_secured

if TYPE_CHECKING:
    from colocate.wire._secured import Secured
    from colocate.wire.event_loop import EventLoop

OnMessage: TypeAlias = Callable[[Head, Packed | None], None]
OnClosed: TypeAlias = Callable[[str], None]

_GONE = frozenset({errno.EPIPE, errno.ECONNRESET})
_TAKEN = frozenset({errno.EBADF, errno.ENOTSOCK})


class SocketLane:
    """A connection of an event loop, created by `EventLoop.attach`.

    Attributes:
        is_finished: Whether the lane has ended: no more messages arrive.
        is_closed_elsewhere: Whether other code has closed the descriptor; the event loop may then miss the end.
    """

    def __init__(self, event_loop: EventLoop, sock: socket.socket, on_message: OnMessage, on_closed: OnClosed) -> None:
        self._event_loop = event_loop
        self._sock = sock
        self._secured = None if type(sock) is socket.socket else get_secured(sock)
        self._is_settled = self._secured is None
        self._on_message = on_message
        self._on_closed = on_closed
        self._passes_files = sock.family == socket.AF_UNIX
        self._reader = Reader(self._passes_files)
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._reading = threading.RLock()  # One thread at a time receives and handles messages.
        self._is_lent = False
        self._queue: deque[Sender | SmallSender] = deque()
        self._loop_writes = False  # Whether the event loop writes the queue; senders then only append.
        self._can_send = True
        self._is_closing = False
        self.is_finished = False
        self.is_closed_elsewhere = False
        self._reason: str | None = None

    @property
    def is_closed(self) -> bool:
        """Whether no more messages can be sent."""
        return not self._can_send

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 if the socket is closed."""
        return self._sock.fileno()

    def send(self, message: Frame | Head, body: Packed | None = None) -> bool:
        """Send a message. Safe on any thread; never blocks.

        The event loop's thread sends the bytes that the socket doesn't take at once. Messages of one lane arrive in the
        order of sending.

        Args:
            message: A frame, which the caller closes, or a head.
            body: With a head: the body, copied before this returns.

        Returns:
            False if the lane is closed. True doesn't promise delivery: if a message is lost, the lane closes.
        """
        if isinstance(message, Frame):
            return self._send(message)
        if not self._can_send:
            return False
        frame = encode(message, body)
        try:
            return self._send(frame)
        finally:
            frame.close()

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this machine, so that files can be passed."""
        return self._passes_files

    def redirect_messages(self, on_message: OnMessage, arrives: OpenBuffer | None = None) -> None:
        """Replace the message handler, from the next message on. Call this on the receiving thread only.

        Args:
            on_message: The new handler.
            arrives: Chooses the destination of long bodies.
        """
        self._on_message, self._reader.open_buffer = on_message, arrives

    def close(self, reason: str = "closed on this side") -> None:
        """Close the lane, on any thread. Unsent messages are dropped (see `drain`), and `on_closed` is called later."""
        with self._lock:
            if self.is_finished:
                return
            self._is_closing = True
            self._shut_down(reason)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all messages are passed to the kernel. Don't call this on the event loop's thread.

        Returns:
            Whether all were taken before the timeout, and before the lane closed.
        """
        deadline = Deadline(timeout)
        with self._empty:
            while self._queue and self._can_send and not deadline.is_over:
                self._empty.wait(deadline.seconds_left)
            return not self._queue and self._can_send

    def finish(self, reason: str) -> None:
        """Handle all received messages and close the lane, because the peer's process has ended.

        Runs on the event loop's thread only. A forked child of the peer may keep the connection open, so that an end of
        file may never come.
        """
        if self.is_finished:
            return
        while not self.is_finished and readable(self._sock.fileno(), 0):
            self._on_events(select.EPOLLIN)
        self._finish(reason)

    def _send(self, frame: Frame) -> bool:
        with self._lock:
            if not self._can_send:
                return False
            try:
                if self._queue or frame.small is None or self._secured is not None:
                    self._queue.append(frame.create_sender(self._passes_files))
                    if len(self._queue) == 1:
                        self._write()
                else:
                    self._send_small(frame.small)
            except BaseException:  # Half a message would make all later messages unreadable.
                self._shut_down("failed in the middle of sending a message")
                raise
            return self._can_send

    # The next methods are for a thread that receives instead of the event loop (see `turns.py`).

    def lend(self) -> bool:
        """Stop receiving on the event loop's thread, so that the caller can receive; return False if the lane ended."""
        return self._set_lent(True)

    def take_back(self) -> None:
        """Resume receiving on the event loop's thread."""
        self._set_lent(False)

    def receive(self, scratch: memoryview) -> None:
        """Receive once, and handle the received messages."""
        with self._reading:
            if not self.is_finished:
                self._receive(scratch)
                if self._secured is not None:
                    self._receive_secured(self._secured, scratch)

    def _receive_secured(self, secured: Secured, scratch: memoryview) -> None:
        """Receive data that TLS has buffered; after the handshake, resume sending."""
        while secured.has_more and not (self.is_finished or self._is_closing):
            self._receive(scratch)
        if not self._is_settled and not self.is_finished:
            self._is_settled = secured.is_open
            self._flush()

    def _set_lent(self, lent: bool) -> bool:
        with self._lock:
            if self.is_finished:
                return False
            if self._is_lent is not lent:
                self._is_lent = lent
                self._update_events()
            return True

    # The methods below run on the event loop's thread, or on the receiving thread.

    def _on_events(self, events: int) -> None:
        if self._is_closing:
            self._finish("closed on this side")
            return
        if events & select.EPOLLOUT:
            self._flush()
        if events & ~select.EPOLLOUT or not self._is_settled:
            self.receive(self._event_loop.scratch)

    def _flush(self) -> None:
        with self._lock:
            if self._loop_writes and self._queue:
                self._loop_writes = False
                self._write()
            if not self.is_finished:
                self._update_events()
            self._empty.notify_all()

    def _receive(self, scratch: memoryview) -> None:
        try:
            messages = self._reader.receive_messages(self._sock, scratch)
        except BlockingIOError:
            return
        except EOFError as error:
            self._finish(f"the other side {error}")
            return
        except OSError as error:
            self._finish(_explain_error(error))
            return
        except Exception as error:
            report_exception()
            self._finish(f"a message could not be read: {type(error).__name__}: {error}")
            return
        for head, body in messages:
            if self._is_closing:
                return
            try:
                self._on_message(head, body)
            except Exception as error:
                report_exception()
                self._finish(f"handling a message raised {type(error).__name__}: {error}")
                return

    def _finish(self, reason: str) -> None:
        """Release all resources and call `on_closed`. Later calls do nothing."""
        with self._reading, self._lock:
            if self.is_finished:
                return
            self.is_finished = True
            self.is_closed_elsewhere = self.is_closed_elsewhere or _is_closed_elsewhere(self._sock)
            self._event_loop.remove_socket(self._sock)
            self._shut_down(reason)
            self._reader.close()
            if self.is_closed_elsewhere:
                self._sock.detach()  # The descriptor's number may already belong to another file.
            else:
                self._sock.close()
        try:
            self._on_closed(self._reason or reason)
        except Exception:
            report_exception()

    # The lock is held while the next methods run.

    def _send_small(self, data: bytearray) -> None:
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:  # The kernel reports an error only once.
            self._on_send_failed(error)
            return
        if sent < len(data):
            self._queue.append(SmallSender(data, sent))
            self._loop_writes = True
            self._update_events()

    def _write(self) -> None:
        """Write the queue on this thread. The event loop continues if the socket is full or the payload is long."""
        queue = self._queue
        try:
            while queue:
                if not queue[0].write_to(self._sock):
                    self._loop_writes = True
                    break
                queue.popleft().close()
        except BlockingIOError:
            self._loop_writes = True
        except OSError as error:
            self._on_send_failed(error)
        if self._loop_writes and not self.is_finished:
            self._update_events()

    def _update_events(self) -> None:
        secured = self._secured
        sends = self._loop_writes if secured is None or secured.is_open else secured.wants_write
        self._event_loop.set_events(
            self._sock, (0 if self._is_lent else select.EPOLLIN) | (select.EPOLLOUT if sends else 0)
        )

    def _on_send_failed(self, error: OSError) -> None:
        """Handle a failure to send.

        If the peer has closed, earlier messages of the peer are still read before the lane ends.
        """
        if error.errno in _GONE:
            self._reason = self._reason or _explain_error(error)
            self._stop_sending()
        else:
            self.is_closed_elsewhere = error.errno in _TAKEN
            self._shut_down(_explain_error(error))

    def _shut_down(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._stop_sending()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The connection had ended, which the event loop notices, too.

    def _stop_sending(self) -> None:
        self._can_send = False
        self._loop_writes = False
        while self._queue:
            self._queue.popleft().close()
        self._empty.notify_all()

    def _close_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._reading = threading.RLock()
        self._empty = threading.Condition(self._lock)
        self._can_send = False
        self._is_closing = self.is_finished = True
        for sending in self._queue:
            sending.abandon()
        self._queue.clear()
        self._reader.close()
        self._sock.close()


def _is_closed_elsewhere(sock: socket.socket) -> bool:
    try:
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    except OSError as error:
        return error.errno in _TAKEN
    return False


def _explain_error(error: OSError) -> str:
    """Describe an error. A reset counts as a close, because a peer that closes with unread data causes a reset."""
    return "the other side closed" if error.errno in _GONE else f"the connection broke: {error.strerror or error}"
