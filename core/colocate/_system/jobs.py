"""`JobThread`: a thread of the framework that runs jobs, soon or later, in order.

What the framework needs runs on such threads, and nothing of the user's runs beside it: a callback that blocks stops
callbacks, and no deadline. They take no lock, so a signal's handler may give them jobs wherever it has interrupted.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import attrs

from colocate._system.limits import THREAD_ENDS_WITHIN_S
from colocate._system.threads import Thread

_SWEEP = 1000
_LOOKS_EVERY_S = 3600.0  # a wait may not be as long as a timer


@attrs.define(eq=False)
class Timer:
    """A job for later; `cancel` keeps it from running."""

    job: Callable[[], object] | None

    def cancel(self) -> None:
        """Forget it; harmless when it has run."""
        self.job = None


class JobThread:
    """Runs jobs in order on one thread, which starts with the first of them.

    A job that raises ends nothing but itself: what it has raised is told to the owner, who knows what can't go on
    without it, and the jobs after it run.
    """

    def __init__(self, name: str, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # None: look around
        self._coming: deque[tuple[float, int, Timer]] = deque()  # timers that the thread hasn't taken yet
        self._timers: list[tuple[float, int, Timer]] = []  # the thread's own
        self._order = itertools.count()
        self._looks_at = math.inf  # when it will look at the timers without being told to
        self._swept = _SWEEP
        self._closing = self._ended = False
        self.note = self._jobs.put  # a job, as `soon`, by a function in C; once the thread has started, and not ended
        self._thread = Thread(target=self._main, name=name)
        self._unstarted = [self._thread]

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on its thread."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread now, if it hasn't been.

        Raises:
            RuntimeError: No thread can be started, for now.
        """
        if self._unstarted:
            with suppress(IndexError):  # somebody else has just taken it
                thread = self._unstarted.pop()
                try:
                    thread.start()
                except BaseException:
                    self._unstarted.append(thread)  # the next job tries it again
                    raise

    def soon(self, job: Callable[[], object]) -> None:
        """Run a job as soon as the earlier ones are done; here and now once the thread has ended.

        Raises:
            RuntimeError: There is no thread yet, and none can be started: the job won't be run.
        """
        self.start()
        self._jobs.put(job)
        if self._ended:
            self._run_what_is_left()

    def after(self, delay_s: float, job: Callable[[], object]) -> Timer:
        """Run a job after a delay; never, once the thread has ended. Raises RuntimeError as `soon` does."""
        self.start()
        timer = Timer(job)
        due = time.monotonic() + delay_s
        self._coming.append((due, next(self._order), timer))
        if due < self._looks_at or len(self._coming) > _SWEEP:  # after it was added: see `_due`
            self._jobs.put(None)
        return timer

    def run(self, job: Callable[[], object]) -> None:
        """Run a job on the thread, wait for it, and raise what it raises."""
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def answered() -> None:
            try:
                job()
            except BaseException as error:
                outcome.put(error)
            else:
                outcome.put(None)

        self.soon(answered)
        if (error := outcome.get()) is not None:
            raise error

    def close(self, within_s: float | None = None) -> bool:
        """Run what is queued, drop the timers, end the thread; whether it has ended, which a job may keep it from.

        What that keeps waiting is run once it has. On the thread itself this returns at once.
        """
        last: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = True
        self._jobs.put(partial(last.put, None))
        try:
            self._unstarted.pop()
        except IndexError:  # it has begun, or somebody else is just starting it, or it never will, having been closed
            if self._ended:
                self._run_what_is_left()
            if self.is_current or (self._ended and not self._thread.is_alive()):
                return True
            within_s = THREAD_ENDS_WITHIN_S if within_s is None else within_s
            try:
                last.get(timeout=within_s)
            except queue.Empty:
                return False
            self._thread.join(within_s)
            return not self._thread.is_alive()
        self._finish()
        return True

    # -- on the thread

    def _main(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            del job  # with what it holds
        self._finish()

    def _finish(self) -> None:
        self._ended = True  # before looking: whoever adds a job after that runs it
        self._coming.clear()
        self._timers.clear()
        self._run_what_is_left()

    def _run_what_is_left(self) -> None:
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    self._run(job)

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            try:
                self._on_fault(error)
            except BaseException:  # there is nobody else to be told
                report_exception()

    def _next(self) -> Callable[[], object] | None:
        """Return the next job, once there is one; None to end."""
        while True:
            try:
                found = self._jobs.get_nowait()
            except queue.Empty:
                if self._closing:
                    return None
                if (due := self._due()) is not None:
                    return due
                with suppress(queue.Empty):
                    found = self._jobs.get(timeout=min(_LOOKS_EVERY_S, max(0.0, self._looks_at - time.monotonic())))
                    if found is not None:
                        return found
            else:
                if found is not None:
                    return found

    def _due(self) -> Callable[[], object] | None:
        """Return a timer's job that is due."""
        while True:
            if len(self._timers) > self._swept:  # cancelled ones needn't stay until they are due
                self._timers = [entry for entry in self._timers if entry[2].job is not None]
                heapq.heapify(self._timers)
                self._swept = max(_SWEEP, 2 * len(self._timers))
            while self._timers and self._timers[0][2].job is None:
                heapq.heappop(self._timers)
            # First this, then the look at what is coming: whoever adds a timer does so before looking at this.
            self._looks_at = self._timers[0][0] if self._timers else math.inf
            if not self._coming:
                break
            with suppress(IndexError):
                while True:
                    entry = self._coming.popleft()
                    if entry[2].job is not None:
                        heapq.heappush(self._timers, entry)
        if self._looks_at > time.monotonic():
            return None
        timer = heapq.heappop(self._timers)[2]
        return timer.job  # None when it was cancelled just now: the thread looks again


def message_of(error: BaseException) -> str:
    """Return the message of an exception, whatever its `__str__` does: a user's code on a thread of the framework."""
    try:
        return str.__str__(str(error))  # which may have given an instance of a class of its own
    except BaseException as fault:
        return f"<its __str__ raised {type(fault).__name__}>"


def error_text(error: BaseException) -> str:
    """Return type and message of an exception."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


OUR_FAULT = "That is a fault of colocate's own: please report it, with the traceback that was printed"


def report_exception() -> None:
    """Report the exception being handled as one that ended a thread would be."""
    kind, value, trace = sys.exc_info()
    if kind is not None:
        with suppress(BaseException):  # hook and stream may be users' own, and this thread is to go on
            threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))


_T = TypeVar("_T")
_R = TypeVar("_R")


def by_threads(do: Callable[[_T], _R], items: Sequence[_T], most: int) -> list[_R]:
    """Return what a function makes of each item, in their order; all is over then, also when the first error is raised.

    The caller's thread is one of them, and does all by itself where no memory is left for more: to start a
    `threading.Thread` waits for ever for one that then dies as it begins, and so does a pool of them.

    Args:
        do: That, which lets others run meanwhile.
        items: They.
        most: How many threads there are at most. There are no more than processors.
    """
    from concurrent.futures import Future, wait  # takes a while, and few workers need it

    made: list[Future[_R]] = [Future() for _ in items]
    left = deque(zip(made, items, strict=True))

    def work() -> None:
        while left:
            try:
                future, item = left.popleft()
            except IndexError:  # another one has just taken the last
                return
            try:
                future.set_result(do(item))
            except BaseException as error:  # the caller raises it
                future.set_exception(error)

    with contextlib.suppress(RuntimeError, MemoryError):  # none can be started
        for _ in range(min(most, len(os.sched_getaffinity(0)), len(items)) - 1):
            _thread.start_new_thread(work, ())
    work()
    wait(made)
    return [each.result() for each in made]
