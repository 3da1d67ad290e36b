"""`Arrivals`: a queue for threads and tasks that loses no item if a reader is interrupted.

A reader moves an item into a list of its own, and puts the list's contents back if a wait or users' code raises.
"""

from __future__ import annotations

import _thread
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from colocate._signals.deferred import SLICE_S, wait_for_lock

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class Arrivals(Generic[T]):
    """A queue that gives each item to one of several waiting readers. All readers are notified of the end.

    Attributes:
        items: Items that no reader has taken, in order.
        is_over: Whether no further items will come.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.is_over = False
        self._waiting: deque[Callable[[], object]] = deque()

    def put_item(self, item: T) -> None:
        """Add an item. Safe on any thread; never blocks."""
        self.items.append(item)
        self.wake_waiters()

    def end_queue(self) -> None:
        """Mark the end of the queue: no further items will come."""
        self.is_over = True
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake all waiting readers, because an item was added or put back, or the queue has ended."""
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.popleft()()

    def take_item(self, into: deque[T]) -> bool:
        """Move the next item from the queue to `into`; return False if the queue is empty."""
        try:
            into.append(self.items.popleft())
        except IndexError:
            return False
        return True

    def wait_for_item(self, at_most_s: float = SLICE_S) -> None:
        """Wait for an item or the end of the queue, at most `at_most_s` seconds.

        The time is short, because a signal just before the wait is handled only at the end of the wait.
        """
        lock = _thread.allocate_lock()
        lock.acquire()
        self._waiting.append(lock.release)
        try:
            if not (self.items or self.is_over):
                wait_for_lock(lock, at_most_s)
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(lock.release)

    async def async_wait_for_item(self) -> None:
        import asyncio

        event = asyncio.Event()
        wake = partial(_set_event, asyncio.get_running_loop(), event)
        self._waiting.append(wake)
        try:
            if not (self.items or self.is_over):
                await event.wait()
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(wake)


def _set_event(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # If the event loop is closed, no task waits any more.
        loop.call_soon_threadsafe(event.set)
