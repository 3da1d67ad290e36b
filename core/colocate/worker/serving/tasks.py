"""Async calls of a lane: tasks of a loop that the lane runs during waits. Imported with the first async call.

Tasks, callbacks and servers that role code leaves there go on while the lane idles, and are cancelled at its end.
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

_OWN = "colocate"  # name of the lane's own tasks
_ASYNCIOS_LEAST = 5  # threads of a loop's default executor, at least


class Tasks:
    """Running async calls of a lane. Only `wake` may be called off the lane's thread."""

    def __init__(self, has_news: Callable[[], bool], places: int) -> None:
        """Set up the loop. Args: has_news: Whether the lane's queue has items. places: See `have_threads`."""
        self._has_news, self._places = has_news, places
        with warnings.catch_warnings():
            # Python may make the first loop, with a warning meant for scripts.
            warnings.simplefilter("ignore", DeprecationWarning)
            loop = current_loop()
        # Objects that role code has made for its current loop work in async methods. A running loop is another
        # thread's.
        self._loop = asyncio.new_event_loop() if loop is None or loop.is_running() else loop
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._task)
        self._woken = asyncio.Event()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._rests: list[asyncio.Future[None]] = []
        self._waits = False  # whether the lane is about to wait here
        self._may_have_others = True  # whether other tasks may exist
        self._threads: ThreadPoolExecutor | None = None
        self.have_threads(places)

    def __len__(self) -> int:
        return len(self._running)

    def go_on(self) -> bool:
        """Return whether role code has left work in the loop between calls, a server or a connection included."""
        loop: Any = self._loop
        if loop.is_closed():
            return False
        selector, timers = getattr(loop, "_selector", None), getattr(loop, "_scheduled", ())
        is_watching = selector is not None and len(selector.get_map()) > 1  # the loop itself has one entry
        is_due = getattr(loop, "_ready", ()) or (timers and not all(timer.cancelled() for timer in timers))
        return is_watching or bool(is_due) or self._has_other_tasks()

    def _has_other_tasks(self) -> bool:
        if self._may_have_others:
            self._may_have_others = len(asyncio.all_tasks(self._loop)) > len(self._running)
        return self._may_have_others

    def have_current(self) -> None:
        """Ensure a current loop: role code may have closed the loop, or left none, as `asyncio.run` does.

        Another loop that role code has made current stays. A closed loop is replaced only while no async call runs.
        """
        if self._loop.is_closed() and not self._running:
            self.__init__(self._has_news, self._places)  # type: ignore[misc]
        if current_loop() is None:
            asyncio.set_event_loop(self._loop)

    def have_threads(self, places: int) -> None:
        """Size the default executor for `asyncio.to_thread` calls, unless role code has set another executor."""
        self._places = places
        if places > _ASYNCIOS_LEAST and getattr(self._loop, "_default_executor", None) is self._threads:
            self._threads = ThreadPoolExecutor(max(places, min(32, (os.cpu_count() or 1) + 4)), "asyncio")
            self._loop.set_default_executor(self._threads)

    def begin(self, number: int, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine up to the first await: async calls start in order."""
        task = self._running[number] = asyncio.Task(coroutine, loop=self._loop)
        task.add_done_callback(lambda _: self._running.pop(number))
        self._turn(asyncio.sleep(0))

    def cancel(self, number: int) -> None:
        """Cancel what a call awaits, as soon as tasks run again."""
        self._running[number].cancel()

    def awaiting(self) -> dict[int, list[FrameType]]:
        """Return where each call waits, outermost frame first, without computing calls. From any thread."""
        stacks = {number: frames_of(task.get_coro()) for number, task in list(self._running.items())}
        return {number: frames for number, frames in stacks.items() if frames}

    def left(self) -> list[list[FrameType]]:
        """Return where tasks wait that role code has left, like `awaiting`, while no call runs. From any thread."""
        leftovers = [task for task in asyncio.all_tasks(self._loop) if task.get_name() != _OWN]
        return [frames for task in leftovers if (frames := frames_of(task.get_coro()))]

    def wait(self) -> None:
        """Run the loop until a call is done or there are news."""
        # The calls of now: one may end before the loop waits, and that end lets the next call begin.
        self._turn(self._until_news([*self._running.values()]))

    def look(self) -> None:
        """Wake the lane's wait as soon as all calls await something."""
        self._woken.set()

    async def rest(self, until: asyncio.Future[None] | None = None) -> None:
        """Wait for `end_rests`, or for the given future."""
        self._rests.append(future := self._loop.create_future() if until is None else until)
        try:
            await future
        finally:
            with contextlib.suppress(ValueError):
                self._rests.remove(future)

    def end_rests(self) -> None:
        """Resume resting calls."""
        rests, self._rests = self._rests, []
        for future in rests:
            if not future.done():
                future.set_result(None)

    def wake(self) -> None:
        """Wake the lane's wait after news."""
        if self._running or self._waits:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the lane has just ended
                self._loop.call_soon_threadsafe(self._woken.set)

    def close(self) -> None:
        """Cancel tasks that role code has left, and close the loop: no call will come any more."""
        if self._loop.is_closed():
            return
        if leftovers := asyncio.all_tasks(self._loop):
            for task in leftovers:
                task.cancel()
            self._turn(_end(leftovers))
        self._turn(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _turn(self, job: Coroutine[Any, Any, None]) -> None:
        """Run the loop until a job of the lane is done."""
        task = asyncio.Task(job, loop=self._loop, name=_OWN)
        while not task.done():
            # SystemExit in a task of role code goes to the code that awaits the task, and stops the loop, too, like a
            # stop by role code. If role code cancels all tasks, then also this one: the lane checks for news and waits
            # anew.
            with contextlib.suppress(SystemExit, KeyboardInterrupt, RuntimeError, asyncio.CancelledError):
                self._loop.run_until_complete(task)

    async def _until_news(self, running: Sequence[asyncio.Task[None]]) -> None:
        self._waits = True  # set before the check: later news wake this wait
        if self._has_news():
            self._waits = False
            return
        woken = asyncio.Task(self._woken.wait(), loop=self._loop, name=_OWN)
        try:
            await asyncio.wait([*running, woken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waits = False
            woken.cancel()
        await asyncio.wait([woken])
        self._woken.clear()  # not before: tasks that ran ahead may have set the event

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        self._may_have_others = True
        block = own_block.get()
        return asyncio.Task(coroutine if block is None else Steps(coroutine, block()), loop=loop, **options)


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)


def current_loop() -> asyncio.AbstractEventLoop | None:
    """Return the thread's current loop, unless closed; on a main thread Python may make the first one now."""
    try:
        loop = asyncio.get_event_loop()
    except RuntimeError:
        return None
    return None if loop.is_closed() else loop


def frames_of(awaited: Any) -> list[FrameType]:
    """Return the frames of a coroutine and of awaited ones, as far as written in Python; empty for a running one."""
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
