"""Async calls of a lane: tasks of a loop that the lane runs while it waits. Imported with the first of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """Those that run. Only `wake` may be called off the lane's thread."""

    def __init__(self, has_news: Callable[[], bool]) -> None:
        """Begin without one.

        Args:
            has_news: Whether something for the lane has come, on which it waits no longer.
        """
        self._has_news = has_news
        self._loop = asyncio.new_event_loop()
        self._woken = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it up to its first await: async calls start in order."""
        task = self._loop.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        self._turn(asyncio.sleep(0))

    def wait(self) -> None:
        """Run them until one is done or there are news."""
        self._turn(self._until_news())

    def wake(self) -> None:
        """There are news."""
        if self._running:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the lane has just ended
                self._loop.call_soon_threadsafe(self._woken.set)

    def close(self) -> None:
        """None will come any more."""
        self._loop.close()

    def _turn(self, job: Coroutine[Any, Any, None]) -> None:
        """Run the loop until a job of the lane's own is done."""
        task = self._loop.create_task(job)
        while not task.done():
            # SystemExit in a task that role code has made goes to whoever awaits that, and stops the loop as well; so
            # does what was to stop it then. Role code that cancels all tasks of the loop cancels this one, too: then
            # the lane looks around, and waits anew.
            with contextlib.suppress(SystemExit, KeyboardInterrupt, RuntimeError, asyncio.CancelledError):
                self._loop.run_until_complete(task)

    async def _until_news(self) -> None:
        self._woken.clear()
        if not self._running or self._has_news():
            return
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait([*self._running, woken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        await asyncio.wait([woken])
