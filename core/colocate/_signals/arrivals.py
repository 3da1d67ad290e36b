"""`Arrivals`: a queue for threads and tasks, of which no interruption loses anything.

A reader takes an item into a list of its own, and puts the list's contents back when a wait, or users' code, raises.
"""

from __future__ import annotations

import _thread
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from colocate._signals.deferred import SLICE_S, wait_for

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class Arrivals(Generic[T]):
    """A queue whose items go to one of those that wait, all of whom hear of the end.

    Attributes:
        come: Those that nobody has taken, in order.
        is_over: Whether no others will come.
    """

    def __init__(self) -> None:
        self.come: deque[T] = deque()
        self.is_over = False
        self._waiting: deque[Callable[[], object]] = deque()

    def put(self, item: T) -> None:
        """Have one taken. On any thread; it doesn't block."""
        self.come.append(item)
        self.wake()

    def end(self) -> None:
        """No others will come."""
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """Have all that wait look again: something has come, or was put back."""
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.popleft()()

    def take(self, into: deque[T]) -> bool:
        """Move the next one into a list; False where there is none."""
        try:
            into.append(self.come.popleft())
        except IndexError:
            return False
        return True

    def wait(self, at_most_s: float = SLICE_S) -> None:
        """Wait until there is something to see, or for a while: a signal may have come just before."""
        lock = _thread.allocate_lock()
        lock.acquire()
        self._waiting.append(lock.release)
        try:
            if not (self.come or self.is_over):
                wait_for(lock, at_most_s)
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(lock.release)

    async def wait_async(self) -> None:
        """Wait until there is something to see."""
        import asyncio

        event = asyncio.Event()
        wake = partial(_set, asyncio.get_running_loop(), event)
        self._waiting.append(wake)
        try:
            if not (self.come or self.is_over):
                await event.wait()
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(wake)


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(event.set)
