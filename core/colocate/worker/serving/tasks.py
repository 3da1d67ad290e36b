"""Runs a lane's async calls as tasks of an event loop while the lane waits. Imported with the first async call.

Tasks, callbacks and servers that role code leaves in the loop continue while the lane is idle. They are cancelled when
the lane ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import CoroutineType, FrameType, GeneratorType
from typing import Any

from colocate.worker.settings import Steps, own_block

_OWN = "colocate"  # Name of the tasks that the lane itself creates.
_ASYNCIOS_LEAST = 5  # Smallest number of threads in asyncio's default executor.


class Tasks:
    """Running async calls of a lane.

    Only `notify_news`, `list_awaiting` and `list_leftovers` may be called off the lane's thread.
    """

    def __init__(self, has_news: Callable[[], bool], places: int) -> None:
        """Set up the loop. Args: has_news: Whether the lane's queue has items. places: See `ensure_threads`."""
        self._has_news, self._places = has_news, places
        with warnings.catch_warnings():
            # Python may create the first loop here, with a warning that is meant for scripts.
            warnings.simplefilter("ignore", DeprecationWarning)
            loop = get_current_loop()
        # If possible, the current loop is used: role code may have made objects that async methods use on this loop.
        # If the loop is running already, it belongs to another thread.
        self._loop = asyncio.new_event_loop() if loop is None or loop.is_running() else loop
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._create_task)
        self._woken = asyncio.Event()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._rests: list[asyncio.Future[None]] = []
        self._is_waiting = False  # Whether the lane waits in the loop, or is about to wait.
        self._may_have_others = True  # Whether tasks other than the running calls may exist.
        self._threads: ThreadPoolExecutor | None = None
        self.ensure_threads(places)

    def __len__(self) -> int:
        return len(self._running)

    def is_active(self) -> bool:
        """Return whether role code has left work in the loop between calls, such as a server or a connection."""
        loop: Any = self._loop
        if loop.is_closed():
            return False
        selector, timers = getattr(loop, "_selector", None), getattr(loop, "_scheduled", ())
        # The loop itself always registers one descriptor.
        is_watching = selector is not None and len(selector.get_map()) > 1
        is_due = getattr(loop, "_ready", ()) or (timers and not all(timer.cancelled() for timer in timers))
        return is_watching or bool(is_due) or self._has_other_tasks()

    def _has_other_tasks(self) -> bool:
        if self._may_have_others:
            self._may_have_others = len(asyncio.all_tasks(self._loop)) > len(self._running)
        return self._may_have_others

    def ensure_current_loop(self) -> None:
        """Ensure a current event loop, because role code may have closed or unset the loop, as `asyncio.run` does.

        A loop that role code has made current stays. A closed loop is replaced only while no async call runs.
        """
        if self._loop.is_closed() and not self._running:
            self.__init__(self._has_news, self._places)  # type: ignore[misc]
        if get_current_loop() is None:
            asyncio.set_event_loop(self._loop)

    def ensure_threads(self, places: int) -> None:
        """Size the default executor, which `asyncio.to_thread` uses, unless role code has set another executor."""
        self._places = places
        if places > _ASYNCIOS_LEAST and getattr(self._loop, "_default_executor", None) is self._threads:
            self._threads = ThreadPoolExecutor(max(places, min(32, (os.cpu_count() or 1) + 4)), "asyncio")
            self._loop.set_default_executor(self._threads)

    def start_task(self, number: int, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a call's coroutine, and run the coroutine up to the first await, so that async calls start in order."""
        task = self._running[number] = asyncio.Task(coroutine, loop=self._loop)
        task.add_done_callback(lambda _: self._running.pop(number))
        self._run_job(asyncio.sleep(0))

    def cancel_task(self, number: int) -> None:
        """Cancel the await of a call as soon as tasks run again."""
        self._running[number].cancel()

    def list_awaiting(self) -> dict[int, list[FrameType]]:
        """Return the frames at which each call waits, outermost first. Calls that compute are left out.

        May run on any thread.
        """
        stacks = {number: list_frames(task.get_coro()) for number, task in list(self._running.items())}
        return {number: frames for number, frames in stacks.items() if frames}

    def list_leftovers(self) -> list[list[FrameType]]:
        """Return the frames at which leftover tasks of role code wait, while no call runs. May run on any thread."""
        leftovers = [task for task in asyncio.all_tasks(self._loop) if task.get_name() != _OWN]
        return [frames for task in leftovers if (frames := list_frames(task.get_coro()))]

    def run_until_news(self) -> None:
        """Run the loop until a call is done or a new item is in the lane's queue."""
        # The calls are listed before the loop runs: if one ends before the wait, the next call may already begin.
        self._run_job(self._wait_for_news([*self._running.values()]))

    def request_look(self) -> None:
        """Wake the lane's wait once all calls await something."""
        self._woken.set()

    async def wait_for_rest_end(self, until: asyncio.Future[None] | None = None) -> None:
        """Wait for `end_rests`, or for the given future."""
        self._rests.append(future := self._loop.create_future() if until is None else until)
        try:
            await future
        finally:
            with contextlib.suppress(ValueError):
                self._rests.remove(future)

    def end_rests(self) -> None:
        """Resume the calls that rest at a pause point."""
        rests, self._rests = self._rests, []
        for future in rests:
            if not future.done():
                future.set_result(None)

    def notify_news(self) -> None:
        """Wake the lane's wait, because a new item is in the queue. May be called from any thread."""
        if self._running or self._is_waiting:
            with contextlib.suppress(RuntimeError):  # The loop is closed if the lane has just ended.
                self._loop.call_soon_threadsafe(self._woken.set)

    def close(self) -> None:
        """Cancel tasks that role code has left, and close the loop, because no more calls will come."""
        if self._loop.is_closed():
            return
        if leftovers := asyncio.all_tasks(self._loop):
            for task in leftovers:
                task.cancel()
            self._run_job(_wait_for_tasks(leftovers))
        self._run_job(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _run_job(self, job: Coroutine[Any, Any, None]) -> None:
        """Run the loop until a coroutine of the lane itself is done."""
        task = asyncio.Task(job, loop=self._loop, name=_OWN)
        while not task.done():
            # SystemExit in a role's task reaches the code that awaits the task, but also stops the loop.
            # Role code may also stop the loop, or cancel all tasks including this one.
            # After such an interruption, the lane runs the loop again, or checks for news.
            with contextlib.suppress(SystemExit, KeyboardInterrupt, RuntimeError, asyncio.CancelledError):
                self._loop.run_until_complete(task)

    async def _wait_for_news(self, running: Sequence[asyncio.Task[None]]) -> None:
        self._is_waiting = True  # Set before `_has_news` is checked, so that later items end this wait.
        if self._has_news():
            self._is_waiting = False
            return
        woken = asyncio.Task(self._woken.wait(), loop=self._loop, name=_OWN)
        try:
            await asyncio.wait([*running, woken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_waiting = False
            woken.cancel()
        await asyncio.wait([woken])
        self._woken.clear()  # Cleared only after these waits, during which tasks may have set the event.

    def _create_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        self._may_have_others = True
        block = own_block.get()
        return asyncio.Task(coroutine if block is None else Steps(coroutine, block()), loop=loop, **options)


async def _wait_for_tasks(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)


def get_current_loop() -> asyncio.AbstractEventLoop | None:
    """Return the thread's current asyncio event loop; None if there is none, or the loop is closed.

    On a main thread, Python may create the first loop now.
    """
    try:
        loop = asyncio.get_event_loop()
    except RuntimeError:
        return None
    return None if loop.is_closed() else loop


def list_frames(awaited: Any) -> list[FrameType]:
    """Return the Python frames of a coroutine and of all awaited coroutines; empty if one of these is running."""
    frames: list[FrameType] = []
    while isinstance(awaited, CoroutineType | GeneratorType | Steps):
        if isinstance(awaited, Steps):
            awaited = awaited.coroutine
            continue
        if isinstance(awaited, CoroutineType):
            frame, runs, awaited = awaited.cr_frame, awaited.cr_running, awaited.cr_await
        else:
            frame, runs, awaited = awaited.gi_frame, awaited.gi_running, awaited.gi_yieldfrom
        if frame is None or runs:
            return []
        frames.append(frame)
    return frames
