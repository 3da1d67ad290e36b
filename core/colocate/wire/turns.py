"""Turns: the thread that uses a lane's messages receives them itself while it has nothing else to do.

That saves a change of threads per message, which on an idle machine costs more than all the rest. While the thread is
busy the event loop receives, so that what is urgent is never kept waiting.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress

from colocate.wire._forks import track
from colocate.wire.framing import SCRATCH_BYTES
from colocate.wire.lane import SocketLane


class Turns:
    """One thread's turns at a lane that an event loop serves otherwise."""

    def __init__(self, lane: SocketLane) -> None:
        self._lane = lane
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._news = select.poll()  # not select: it can't take descriptors from 1024 on
        self._fd = lane.fileno()
        self._news.register(self._fd, select.POLLIN)
        self._news.register(self._wake, select.POLLIN)
        self._waiting = False
        track(self)

    def soon(self) -> None:
        """Take a turn already: this thread is about to `wait`, and what it sends before that may be answered at once.

        Else the event loop would often be the one that receives the answer, and two threads would want to go on.
        """
        try:
            self._lane.lend()
        except OSError:
            pass  # A role has closed the descriptor, which whoever sends next finds.

    def over(self) -> None:
        """End a turn that `soon` has begun, and after which nothing is waited for."""
        with suppress(OSError):
            self._lane.take_back()

    def wait(self, until: Callable[[], bool]) -> bool:
        """Receive messages until something is so, or the lane has ended; always on the same thread.

        Args:
            until: What is waited for: a message brings it about, or another thread, which then calls `wake`.

        Returns:
            Whether it is so.
        """
        if not self._lane.lend():
            return until()
        try:
            while not (found := until()) and not self._lane.finished:
                for fd in self._readable(until):
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                    else:
                        self._lane.receive(self._scratch)
            return found
        finally:
            self._lane.take_back()

    def _readable(self, until: Callable[[], bool]) -> list[int]:
        self._waiting = True  # before looking once more: whoever brings it about after that wakes this thread
        try:
            return [] if until() else [fd for fd, _ in self._news.poll()]
        finally:
            self._waiting = False

    def turn_to(self, lane: SocketLane) -> None:
        """Receive from another lane from now on: the one before has ended. On the thread that waits."""
        if self._fd >= 0:
            self._news.unregister(self._fd)
        self._lane, self._fd = lane, lane.fileno()
        if self._fd >= 0:  # otherwise it has ended as well, which `wait` finds
            self._news.register(self._fd, select.POLLIN)

    def wake(self) -> None:
        """Have the thread look again; from any thread."""
        if self._waiting:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Note that the lane's thread is through, and nobody wakes it any more."""
        wake, self._wake = self._wake, -1
        os.close(wake)

    def forget(self) -> None:
        """In a forked child: close what was inherited."""
        if self._wake >= 0:
            os.close(self._wake)
