"""A lane: one connection that carries messages both ways, in order, and never makes a sender wait."""

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
from colocate.wire.arriving import Arrives
from colocate.wire.framing import Frame, Head, Reader, Sending, SmallSending, encode
from colocate.wire.tls import secured

if TYPE_CHECKING:
    from colocate.wire._secured import Secured
    from colocate.wire.event_loop import EventLoop

OnMessage: TypeAlias = Callable[[Head, Packed | None], None]
OnClosed: TypeAlias = Callable[[str], None]

_GONE = frozenset({errno.EPIPE, errno.ECONNRESET})
_TAKEN = frozenset({errno.EBADF, errno.ENOTSOCK})


class SocketLane:
    """One connection of an event loop; made by `EventLoop.attach`.

    Attributes:
        finished: Whether it is over: nothing is received any more.
        taken: Whether its descriptor was found closed by somebody else; the event loop need not see its end then.
    """

    def __init__(self, event_loop: EventLoop, sock: socket.socket, on_message: OnMessage, on_closed: OnClosed) -> None:
        self._event_loop = event_loop
        self._sock = sock
        self._secured = None if type(sock) is socket.socket else secured(sock)
        self._settled = self._secured is None
        self._on_message = on_message
        self._on_closed = on_closed
        self._passes_files = sock.family == socket.AF_UNIX
        self._reader = Reader(self._passes_files)
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._reading = threading.RLock()  # held while messages are received and handled: one thread at a time does
        self._lent = False
        self._queue: deque[Sending | SmallSending] = deque()
        self._hub_writes = False  # what is in the queue; who has put something there no longer does
        self._can_send = True
        self._closing = False
        self.finished = False
        self.taken = False
        self._reason: str | None = None

    @property
    def closed(self) -> bool:
        """Whether sending is over."""
        return not self._can_send

    def fileno(self) -> int:
        """The socket's descriptor; -1 when closed."""
        return self._sock.fileno()

    def send(self, message: Frame | Head, body: Packed | None = None) -> bool:
        """Send a message; from any thread, without ever blocking.

        What the socket doesn't take at once is sent by the event loop's thread. Messages of one lane arrive in
        the order in which they were sent.

        Args:
            message: A frame, which stays the caller's to close, or a head.
            body: With a head: its body, which is copied before this returns.

        Returns:
            False when the lane is closed. True is no promise that the message arrives: if it doesn't, the lane closes.
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
        """Whether its other end is on this machine, and is passed files."""
        return self._passes_files

    def pass_to(self, on_message: OnMessage, arrives: Arrives | None = None) -> None:
        """Have something else get the messages from the next one on. On the thread that receives them.

        `arrives` says where long bodies are to arrive.
        """
        self._on_message, self._reader.arrives = on_message, arrives

    def close(self, reason: str = "closed on this side") -> None:
        """Close the lane; from any thread. What isn't sent yet is dropped (see `drain`), and `on_closed` follows."""
        with self._lock:
            if self.finished:
                return
            self._closing = True
            self._shut(reason)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything has been given to the kernel; not on the event loop's thread.

        Returns:
            Whether it has been, before the timeout and before the lane closed.
        """
        deadline = Deadline(timeout)
        with self._empty:
            while self._queue and self._can_send and not deadline.is_over:
                self._empty.wait(deadline.left)
            return not self._queue and self._can_send

    def finish(self, reason: str) -> None:
        """Take what has arrived, then close: the other process is known to be gone. On the event loop's thread only.

        Its end of the connection may still be open in a child that it forked, so there may be no end of file.
        """
        if self.finished:
            return
        while not self.finished and readable(self._sock.fileno(), 0):
            self._on_events(select.EPOLLIN)
        self._finish(reason)

    def _send(self, frame: Frame) -> bool:
        with self._lock:
            if not self._can_send:
                return False
            try:
                if self._queue or frame.small is None or self._secured is not None:
                    self._queue.append(frame.sending(self._passes_files))
                    if len(self._queue) == 1:
                        self._write()
                else:
                    self._send_small(frame.small)
            except BaseException:  # nobody knows how much was written, and half a message would garble all others
                self._shut("failed in the middle of sending a message")
                raise
            return self._can_send

    # For the thread that has taken its turn (see `turns.py`):

    def lend(self) -> bool:
        """Have the calling thread receive from now on, instead of the event loop's; False when the lane has ended."""
        return self._lend(True)

    def take_back(self) -> None:
        """Have the event loop receive again."""
        self._lend(False)

    def receive(self, scratch: memoryview) -> None:
        """Receive what is there and handle it."""
        with self._reading:
            if not self.finished:
                self._receive(scratch)
                if self._secured is not None:
                    self._settle(self._secured, scratch)

    def _settle(self, secured: Secured, scratch: memoryview) -> None:
        """Receive what TLS has and the kernel doesn't show; see to it that sending goes on once TLS is set up."""
        while secured.has_more and not (self.finished or self._closing):
            self._receive(scratch)
        if not self._settled and not self.finished:
            self._settled = secured.is_open
            self._flush()

    def _lend(self, lent: bool) -> bool:
        with self._lock:
            if self.finished:
                return False
            if self._lent is not lent:
                self._lent = lent
                self._show_interest()
            return True

    # What follows runs on the event loop's thread, or on the one that receives.

    def _on_events(self, events: int) -> None:
        if self._closing:
            self._finish("closed on this side")
            return
        if events & select.EPOLLOUT:
            self._flush()
        if events & ~select.EPOLLOUT or not self._settled:
            self.receive(self._event_loop.scratch)

    def _flush(self) -> None:
        with self._lock:
            if self._hub_writes and self._queue:
                self._hub_writes = False
                self._write()
            if not self.finished:
                self._show_interest()
            self._empty.notify_all()

    def _receive(self, scratch: memoryview) -> None:
        try:
            messages = self._reader.read(self._sock, scratch)
        except BlockingIOError:
            return
        except EOFError as error:
            self._finish(f"the other side {error}")
            return
        except OSError as error:
            self._finish(_reason(error))
            return
        except Exception as error:
            report_exception()
            self._finish(f"a message could not be read: {type(error).__name__}: {error}")
            return
        for head, body in messages:
            if self._closing:
                return
            try:
                self._on_message(head, body)
            except Exception as error:
                report_exception()
                self._finish(f"handling a message raised {type(error).__name__}: {error}")
                return

    def _finish(self, reason: str) -> None:
        """Release everything and say so, once."""
        with self._reading, self._lock:
            if self.finished:
                return
            self.finished = True
            self.taken = self.taken or _is_taken(self._sock)
            self._event_loop.drop(self._sock)
            self._shut(reason)
            self._reader.close()
            if self.taken:
                self._sock.detach()  # the number may be somebody else's by now
            else:
                self._sock.close()
        try:
            self._on_closed(self._reason or reason)
        except Exception:
            report_exception()

    # With the lock held:

    def _send_small(self, data: bytearray) -> None:
        """Send the only message at once, as nearly always; the event loop sends what the socket doesn't take."""
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:  # which the kernel tells once
            self._break(error)
            return
        if sent < len(data):
            self._queue.append(SmallSending(data, sent))
            self._hub_writes = True
            self._show_interest()

    def _write(self) -> None:
        """Write what is in the queue, as it is this thread's turn to; the event loop goes on if that takes long."""
        queue = self._queue
        try:
            while queue:
                if not queue[0].write(self._sock):
                    self._hub_writes = True
                    break
                queue.popleft().close()
        except BlockingIOError:
            self._hub_writes = True
        except OSError as error:
            self._break(error)
        if self._hub_writes and not self.finished:
            self._show_interest()

    def _show_interest(self) -> None:
        """Tell the event loop what to look for."""
        secured = self._secured
        sends = self._hub_writes if secured is None or secured.is_open else secured.wants_write
        self._event_loop.look_for(self._sock, (0 if self._lent else select.EPOLLIN) | (select.EPOLLOUT if sends else 0))

    def _break(self, error: OSError) -> None:
        """Sending failed. What the other side sent before is still read; then its end is found, and the lane ends."""
        if error.errno in _GONE:
            self._reason = self._reason or _reason(error)
            self._stop_sending()
        else:
            self.taken = error.errno in _TAKEN
            self._shut(_reason(error))

    def _shut(self, reason: str) -> None:
        """End the connection in both directions; the event loop sees that and finishes the lane."""
        self._reason = self._reason or reason
        self._stop_sending()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It ended already, which the event loop sees too.

    def _stop_sending(self) -> None:
        self._can_send = False
        self._hub_writes = False
        while self._queue:
            self._queue.popleft().close()
        self._empty.notify_all()

    def _forget_fork(self) -> None:
        """In a forked child: close what was inherited, whatever state a lock was left in."""
        self._lock = threading.Lock()
        self._reading = threading.RLock()
        self._empty = threading.Condition(self._lock)
        self._can_send = False
        self._closing = self.finished = True
        for sending in self._queue:
            sending.abandon()
        self._queue.clear()
        self._reader.close()
        self._sock.close()


def _is_taken(sock: socket.socket) -> bool:
    """Whether somebody else has closed its descriptor."""
    try:
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    except OSError as error:
        return error.errno in _TAKEN
    return False


def _reason(error: OSError) -> str:
    """A reset is how a close looks when not everything had been read."""
    return "the other side closed" if error.errno in _GONE else f"the connection broke: {error.strerror or error}"
