"""A thread with an event loop, on which the driver's side of Dask lives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import selectors
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from colocate import wire
from colocate.errors import ClusterError
from colocate.keeper import Thread

T = TypeVar("T")
_ENDS_WITHIN_S = 10.0
_CANCELS, _CANCELLED_WITHIN_S = 5, 1.0


NAME = "colocate-dask"
"""Of its thread."""


class LoopThread:
    """Runs coroutines for other threads. Ours, and not Dask's, so that it ends even when Dask doesn't get along."""

    def __init__(self) -> None:
        """Start it."""
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._asked: set[concurrent.futures.Future[Any]] = set()
        self._ending = False
        wire.track(self)
        started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()
        self._thread = Thread(target=self._main, args=(started,), name=NAME)
        self._thread.start()
        self._loop, self._over = started.get()

    def run(self, coming: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
        """Run a coroutine, and wait for it; cancel it when the time is up, or Ctrl-C comes.

        Raises:
            TimeoutError: It took longer, or the loop ends.
        """
        with self._lock:  # a loop that has looked for the last time would never come to it
            if self._ending:
                coming.close()
                raise TimeoutError("the event loop has been closed")
            future = asyncio.run_coroutine_threadsafe(coming, self._loop)
            self._asked.add(future)
        try:
            return future.result(within_s)
        except concurrent.futures.CancelledError as error:
            raise TimeoutError("it was cancelled") from error
        finally:
            future.cancel()
            self._asked.discard(future)

    def close(self) -> None:
        """Cancel what runs, and end the thread; who waits for something is told.

        Raises:
            ClusterError: Something of Dask's doesn't end; it is left to itself.
        """
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_ENDS_WITHIN_S)
        if self._thread.is_alive():
            for future in list(self._asked):
                future.cancel()
            raise ClusterError("a part of Dask in this process doesn't end when it is cancelled; it is left behind")

    def forget(self) -> None:
        """In a forked child: what the loop reads from or writes to isn't held open by this process.

        Otherwise the scheduler wouldn't notice the driver's end before the child's. Dask's objects, which are copies as
        well, close these descriptors one day: so they aren't closed here, but lead nowhere from now on.
        """
        watched = {key.fd for key in list((self._selector.get_map() or {}).values())}  # none once it is closed
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in watched - {nowhere}:
            os.dup2(nowhere, descriptor, inheritable=False)
        if nowhere not in watched:  # what else was forgotten may have closed one of them, whose number this has then
            os.close(nowhere)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report what nobody has looked at, but for waits of Dask's whose time was up in the loop's last turns."""
        if not (self._ending and isinstance(context.get("exception"), TimeoutError)):
            loop.default_exception_handler(context)

    def _main(self, started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        async def serve() -> None:
            over = asyncio.Event()
            loop = asyncio.get_running_loop()
            # What Dask has other threads do is little: one is enough, and is there from the beginning.
            loop.set_default_executor(ThreadPoolExecutor(1, "colocate-dask-helper"))
            await loop.run_in_executor(None, int)
            loop.set_exception_handler(self._report)
            started.put((loop, over))
            await over.wait()
            with self._lock:
                self._ending = True
            await asyncio.sleep(0)  # what was asked for until now becomes tasks
            await _cancel_all()

        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector)) as runner:
            runner.run(serve())


async def _cancel_all() -> None:
    """Cancel every other task, again if need be.

    One of Dask's closes its worker when it is cancelled, and for that waits for another one, which was cancelled too.
    """
    for _ in range(_CANCELS):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        for task in (await asyncio.wait(others, timeout=_CANCELLED_WITHIN_S))[0]:
            if not task.cancelled():
                task.exception()  # nobody else asks for it
