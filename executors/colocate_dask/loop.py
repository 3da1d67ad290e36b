"""A thread with an event loop, which runs the Dask client of the driver."""

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
"""The name of the thread that runs the event loop."""


class LoopThread:
    """Runs coroutines for other threads, on an event loop that ends even when Dask is stuck.

    Dask's own event loop might not end.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._futures: set[concurrent.futures.Future[Any]] = set()
        self._ending = False
        wire.track(self)
        started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()
        self._thread = Thread(target=self._run_loop, args=(started,), name=NAME)
        self._thread.start()
        self._loop, self._stop_event = started.get()

    def run_coroutine(self, coming: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
        """Run a coroutine on the loop's thread and wait for the result. A timeout or Ctrl-C cancels the coroutine.

        Raises:
            TimeoutError: The coroutine took longer, or the loop ends.
        """
        with self._lock:  # A loop that is already ending would never run this coroutine.
            if self._ending:
                coming.close()
                raise TimeoutError("the event loop has been closed")
            future = asyncio.run_coroutine_threadsafe(coming, self._loop)
            self._futures.add(future)
        try:
            return future.result(within_s)
        except concurrent.futures.CancelledError as error:
            raise TimeoutError("it was cancelled") from error
        finally:
            future.cancel()
            self._futures.discard(future)

    def close(self) -> None:
        """Cancel all coroutines and end the thread. Pending calls of `run_coroutine` raise a TimeoutError.

        Raises:
            ClusterError: A part of Dask doesn't end after the cancellation. The thread is abandoned.
        """
        self._loop.call_soon_threadsafe(self._stop_event.set)
        self._thread.join(_ENDS_WITHIN_S)
        if self._thread.is_alive():
            for future in list(self._futures):
                future.cancel()
            raise ClusterError("a part of Dask in this process doesn't end when it is cancelled; it is left behind")

    def close_after_fork(self) -> None:
        """Redirect the loop's descriptors to /dev/null in a forked child, so that the child holds no connection open.

        The scheduler would otherwise notice the driver's end only after the child's. The descriptors stay open: Dask's
        objects, copied into the child too, close these numbers later.
        """
        # The map is None once the selector is closed.
        watched = {key.fd for key in list((self._selector.get_map() or {}).values())}
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in watched - {nowhere}:
            os.dup2(nowhere, descriptor, inheritable=False)
        # Another `close_after_fork` may have closed a watched descriptor, and `os.open` may have reused the number.
        if nowhere not in watched:
            os.close(nowhere)

    def _report_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report unhandled errors, except timeouts of Dask's own waits while the loop is ending."""
        if not (self._ending and isinstance(context.get("exception"), TimeoutError)):
            loop.default_exception_handler(context)

    def _run_loop(self, started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        async def serve() -> None:
            over = asyncio.Event()
            loop = asyncio.get_running_loop()
            # Dask rarely uses helper threads, so one is enough. The thread starts now, so that no later start can fail.
            loop.set_default_executor(ThreadPoolExecutor(1, "colocate-dask-helper"))
            await loop.run_in_executor(None, int)
            loop.set_exception_handler(self._report_exception)
            started.put((loop, over))
            await over.wait()
            with self._lock:
                self._ending = True
            await asyncio.sleep(0)  # Pending `run_coroutine` calls become tasks during this sleep.
            await _cancel_all()

        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector)) as runner:
            runner.run(serve())


async def _cancel_all() -> None:
    """Cancel all other tasks of the event loop, and repeat this if tasks don't end.

    A cancelled task of Dask closes its worker, and during this waits for another task that was also cancelled.
    """
    for _ in range(_CANCELS):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        for task in (await asyncio.wait(tasks, timeout=_CANCELLED_WITHIN_S))[0]:
            if not task.cancelled():
                task.exception()  # This call marks the exception as retrieved, which silences a warning.
