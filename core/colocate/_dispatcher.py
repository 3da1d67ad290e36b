"""The runtime's dispatcher: one thread for callbacks and timers, which so never run on a worker's or I/O thread."""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import attrs

from colocate.worker.failure import frame_of, stack_of_role_code

_SWEEP = 1000
_ENDS_WITHIN_S = 5.0


@attrs.define(eq=False)
class Timer:
    """A job for later; `cancel` keeps it from running."""

    job: Callable[[], None] | None

    def cancel(self) -> None:
        """Forget it; harmless when it has run."""
        self.job = None


class Dispatcher:
    """Runs jobs soon or later, in order, on one thread."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._news = threading.Condition()
        self._swept = _SWEEP
        self._closed = self._ended = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on its thread."""
        return threading.current_thread() is self._thread

    def soon(self, job: Callable[[], object]) -> None:
        """Run a job as soon as the earlier ones are done; here and now once the thread has ended."""
        with self._news:
            if not self._ended:
                self._jobs.append(job)
                self._news.notify()
                return
        _run(job)

    def after(self, delay_s: float, job: Callable[[], None]) -> Timer:
        """Run a job after a delay."""
        timer = Timer(job)
        with self._news:
            heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
            if self._timers[0][2] is timer:
                self._news.notify()
            if len(self._timers) > self._swept:  # cancelled ones needn't stay until they are due
                self._timers = [entry for entry in self._timers if entry[2].job is not None]
                heapq.heapify(self._timers)
                self._swept = max(_SWEEP, 2 * len(self._timers))
        return timer

    def close(self) -> bool:
        """Run what is queued, drop the timers, end the thread; whether it has ended, which a callback may keep it from.

        What that keeps waiting is run once it has.
        """
        with self._news:
            self._closed = True
            self._news.notify()
        if not self.is_current:
            self._thread.join(_ENDS_WITHIN_S)
        return not self._thread.is_alive() or self.is_current

    @property
    def stack(self) -> str:
        """What its thread is doing."""
        frame = frame_of(self._thread)
        return "" if frame is None else "".join(stack_of_role_code(frame))

    def _main(self) -> None:
        while (job := self._next()) is not None:
            _run(job)
            del job

    def _next(self) -> Callable[[], object] | None:
        with self._news:
            while True:
                if self._jobs:
                    return self._jobs.popleft()
                if self._closed:
                    self._ended = True
                    return None
                delay = None
                while self._timers:
                    due, _, timer = self._timers[0]
                    job = timer.job
                    if job is None:
                        heapq.heappop(self._timers)
                    elif due <= time.monotonic():
                        heapq.heappop(self._timers)
                        return job
                    else:
                        delay = due - time.monotonic()
                        break
                self._news.wait(None if delay is None else max(0.0, delay))


def _run(job: Callable[[], object]) -> None:
    try:
        job()
    except BaseException as error:
        # A user's callback: reported as Python reports what nobody can catch, and the others still run. It can't end
        # the process either, as it isn't the main thread.
        sys.excepthook(type(error), error, error.__traceback__)
