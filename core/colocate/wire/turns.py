"""Receive a lane's messages on the thread that needs the messages, while that thread has nothing else to do.

This saves a thread switch per message, which on an idle machine costs more than all the rest. While the thread is busy,
the event loop receives, so that urgent messages never wait.
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
    """Receives from a lane on one thread, in turns with the lane's event loop."""

    def __init__(self, lane: SocketLane) -> None:
        self._lane = lane
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._news = select.poll()  # `select` isn't used, because descriptors may exceed 1023.
        self._fd = lane.fileno()
        self._news.register(self._fd, select.POLLIN)
        self._news.register(self._wake, select.POLLIN)
        self._is_waiting = False
        track(self)

    def take_turn(self) -> None:
        """Begin a turn before `receive_until` is called, because an answer may arrive earlier.

        Otherwise the event loop would often receive the answer, and two threads would compete.
        """
        try:
            self._lane.lend()
        except OSError:
            pass  # A role has closed the descriptor, which the next send notices.

    def end_turn(self) -> None:
        """End a turn that `take_turn` has begun and no `receive_until` has used."""
        with suppress(OSError):
            self._lane.take_back()

    def receive_until(self, until: Callable[[], bool]) -> bool:
        """Receive messages until a condition holds or the lane has ended. Always call this on the same thread.

        Args:
            until: The condition. A message makes it true, or another thread, which then calls `notify_news`.

        Returns:
            Whether the condition holds.
        """
        if not self._lane.lend():
            return until()
        try:
            while not (is_done := until()) and not self._lane.is_finished:
                for fd in self._poll_readable(until):
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                    else:
                        self._lane.receive(self._scratch)
            return is_done
        finally:
            self._lane.take_back()

    def _poll_readable(self, until: Callable[[], bool]) -> list[int]:
        self._is_waiting = True  # Set before the check, so that `notify_news` also works between check and wait.
        try:
            return [] if until() else [fd for fd, _ in self._news.poll()]
        finally:
            self._is_waiting = False

    def use_lane(self, lane: SocketLane) -> None:
        """Receive from another lane from now on, as the previous lane has ended. Call this on the waiting thread."""
        if self._fd >= 0:
            self._news.unregister(self._fd)
        self._lane, self._fd = lane, lane.fileno()
        if self._fd >= 0:  # Otherwise the new lane has ended, too, as `receive_until` will notice.
            self._news.register(self._fd, select.POLLIN)

    def notify_news(self) -> None:
        """Wake the waiting thread to check the condition again. Safe on any thread."""
        if self._is_waiting:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the wake-up descriptor, because the waiting thread has ended."""
        wake, self._wake = self._wake, -1
        os.close(wake)

    def close_after_fork(self) -> None:
        """Close the inherited descriptor in a forked child."""
        if self._wake >= 0:
            os.close(self._wake)
