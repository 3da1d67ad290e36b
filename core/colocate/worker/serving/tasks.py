"""Async calls of a lane: tasks of a loop that the lane runs while it waits. Imported with the first of them.

What role code leaves there (tasks, callbacks, servers) goes on while the lane idles, and is cancelled at its end.
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

_OWN = "colocate"  # names the lane's own tasks
_ASYNCIOS_LEAST = 5  # threads of a loop that nobody has told how many


class Tasks:
    """The async calls that run. Only `wake` may be called off the lane's thread."""

    def __init__(self, has_news: Callable[[], bool], places: int) -> None:
        """Begin without one. Args: has_news: Whether the lane is to look around. places: See `have_threads`."""
        self._has_news, self._places = has_news, places
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that Python makes one, as a script has it be told
            loop = current_loop()
        # What role code has made for its current loop works in async methods. One that runs is another thread's.
        self._loop = asyncio.new_event_loop() if loop is None or loop.is_running() else loop
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._task)
        self._woken = asyncio.Event()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._rests: list[asyncio.Future[None]] = []
        self._waits = False  # the lane is about to, here
        self._may_have_others = True  # tasks
        self._threads: ThreadPoolExecutor | None = None
        self.have_threads(places)

    def __len__(self) -> int:
        return len(self._running)

    def go_on(self) -> bool:
        """Whether role code has left something that goes on between calls, a server or a connection among it."""
        loop: Any = self._loop
        if loop.is_closed():
            return False
        selector, timers = getattr(loop, "_selector", None), getattr(loop, "_scheduled", ())
        is_watching = selector is not None and len(selector.get_map()) > 1  # one is the loop's own
        is_due = getattr(loop, "_ready", ()) or (timers and not all(timer.cancelled() for timer in timers))
        return is_watching or bool(is_due) or self._has_other_tasks()

    def _has_other_tasks(self) -> bool:
        if self._may_have_others:
            self._may_have_others = len(asyncio.all_tasks(self._loop)) > len(self._running)
        return self._may_have_others

    def have_current(self) -> None:
        """See that there is a current loop: role code may have closed it, or left none, as `asyncio.run` does.

        Where role code has made another one current, that stays. Between calls of which none is of these.
        """
        if self._loop.is_closed() and not self._running:
            self.__init__(self._has_news, self._places)  # type: ignore[misc]
        if current_loop() is None:
            asyncio.set_event_loop(self._loop)

    def have_threads(self, places: int) -> None:
        """See that what so many calls or rows do by `asyncio.to_thread` runs at once, if role code hasn't."""
        self._places = places
        if places > _ASYNCIOS_LEAST and getattr(self._loop, "_default_executor", None) is self._threads:
            self._threads = ThreadPoolExecutor(max(places, min(32, (os.cpu_count() or 1) + 4)), "asyncio")
            self._loop.set_default_executor(self._threads)

    def begin(self, number: int, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it up to its first await: async calls start in order."""
        task = self._running[number] = asyncio.Task(coroutine, loop=self._loop)
        task.add_done_callback(lambda _: self._running.pop(number))
        self._turn(asyncio.sleep(0))

    def cancel(self, number: int) -> None:
        """Cancel what a call awaits, when tasks run next."""
        self._running[number].cancel()

    def awaiting(self) -> dict[int, list[FrameType]]:
        """Where each of them waits, the outermost frame first; none of one that computes. From any thread."""
        found = {number: frames_of(task.get_coro()) for number, task in list(self._running.items())}
        return {number: frames for number, frames in found.items() if frames}

    def left(self) -> list[list[FrameType]]:
        """Where tasks wait that role code has left, as `awaiting`; while no call runs. From any thread."""
        others = [task for task in asyncio.all_tasks(self._loop) if task.get_name() != _OWN]
        return [frames for task in others if (frames := frames_of(task.get_coro()))]

    def wait(self) -> None:
        """Run them, and what role code has left, until one is done or there are news."""
        # Those of now: one may end before the loop comes to wait, and its end lets the next call begin.
        self._turn(self._until_news([*self._running.values()]))

    def look(self) -> None:
        """Have the lane look around, as soon as all have come to await something."""
        self._woken.set()

    async def rest(self, until: asyncio.Future[None] | None = None) -> None:
        """Wait for `end_rests`, or until something is done."""
        self._rests.append(found := self._loop.create_future() if until is None else until)
        try:
            await found
        finally:
            with contextlib.suppress(ValueError):
                self._rests.remove(found)

    def end_rests(self) -> None:
        """Have those go on that rest."""
        rests, self._rests = self._rests, []
        for each in rests:
            if not each.done():
                each.set_result(None)

    def wake(self) -> None:
        """There are news."""
        if self._running or self._waits:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the lane has just ended
                self._loop.call_soon_threadsafe(self._woken.set)

    def close(self) -> None:
        """Cancel what role code has left: no call will come any more."""
        if self._loop.is_closed():
            return
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._turn(_end(left))
        self._turn(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _turn(self, job: Coroutine[Any, Any, None]) -> None:
        """Run the loop until a job of the lane's own is done."""
        task = asyncio.Task(job, loop=self._loop, name=_OWN)
        while not task.done():
            # SystemExit in a task that role code has made goes to whoever awaits that, and stops the loop as well; so
            # does what was to stop it then. Role code that cancels all tasks of the loop cancels this one, too: then
            # the lane looks around, and waits anew.
            with contextlib.suppress(SystemExit, KeyboardInterrupt, RuntimeError, asyncio.CancelledError):
                self._loop.run_until_complete(task)

    async def _until_news(self, running: Sequence[asyncio.Task[None]]) -> None:
        self._waits = True  # before looking: whoever brings news after that wakes this
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
        self._woken.clear()  # not before: tasks that ran ahead of this one may have had the lane look around

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make one of role code's."""
        self._may_have_others = True
        block = own_block.get()
        return asyncio.Task(coroutine if block is None else Steps(coroutine, block()), loop=loop, **options)


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)


def current_loop() -> asyncio.AbstractEventLoop | None:
    """The current loop of this thread, unless it is closed; on a main thread Python may make its first one now."""
    try:
        loop = asyncio.get_event_loop()
    except RuntimeError:
        return None
    return None if loop.is_closed() else loop


def frames_of(awaited: Any) -> list[FrameType]:
    """The frames of a coroutine and of what it awaits, as far as they are written in Python; none while it runs."""
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
