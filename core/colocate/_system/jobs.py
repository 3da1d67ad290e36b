"""Run jobs on threads of the framework, at once or after a delay, in order (`JobThread`).

Only framework code runs on such threads, so that a user's callback that blocks can't delay a deadline. Adding a job
takes no lock: signal handlers may add jobs anywhere.
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
_LOOKS_EVERY_S = 3600.0  # One wait lasts at most this many seconds, because the system limits waits.


@attrs.define(eq=False)
class Timer:
    """A delayed job that can be cancelled."""

    job: Callable[[], object] | None

    def cancel(self) -> None:
        """Cancel the job. Has no effect if the job has already run."""
        self.job = None


class JobThread:
    """Runs jobs in order on one thread, which starts with the first job.

    A job that raises affects no later job: the exception goes to the owner's `on_fault`.
    """

    def __init__(self, name: str, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        # A None in the queue only wakes the thread.
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._new_timers: deque[tuple[float, int, Timer]] = deque()  # New timers wait here for the thread.
        self._timers: list[tuple[float, int, Timer]] = []  # Only the thread uses this heap.
        self._order = itertools.count()
        self._next_look = math.inf  # The thread checks timers at this time, unless woken earlier.
        self._swept = _SWEEP
        self._closing = self._ended = False
        # `enqueue` adds a job as `call_soon` does, but runs no Python code. The thread must be running.
        self.enqueue = self._jobs.put
        self._thread = Thread(target=self._main, name=name)
        self._unstarted = [self._thread]

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread now, unless started before.

        Raises:
            RuntimeError: No thread can be started at present.
        """
        if self._unstarted:
            with suppress(IndexError):  # Another thread may have just started this thread.
                thread = self._unstarted.pop()
                try:
                    thread.start()
                except BaseException:
                    self._unstarted.append(thread)  # The next job tries to start the thread again.
                    raise

    def call_soon(self, job: Callable[[], object]) -> None:
        """Queue a job to run after all earlier jobs; run the job directly if the thread has ended.

        Raises:
            RuntimeError: There is no thread yet, and none can be started: the job won't run.
        """
        self.start()
        self._jobs.put(job)
        if self._ended:
            self._run_remaining()

    def call_later(self, delay_s: float, job: Callable[[], object]) -> Timer:
        """Run a job after some seconds, or never if the thread ends earlier. Raises errors like `call_soon`."""
        self.start()
        timer = Timer(job)
        due = time.monotonic() + delay_s
        self._new_timers.append((due, next(self._order), timer))
        # This check follows the append, because `_pop_due` relies on that order.
        if due < self._next_look or len(self._new_timers) > _SWEEP:
            self._jobs.put(None)
        return timer

    def run(self, job: Callable[[], object]) -> None:
        """Run a job on the thread, wait for the end of the job, and raise the job's exception, if any."""
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def answered() -> None:
            try:
                job()
            except BaseException as error:
                outcome.put(error)
            else:
                outcome.put(None)

        self.call_soon(answered)
        if (error := outcome.get()) is not None:
            raise error

    def close(self, within_s: float | None = None) -> bool:
        """Run the queued jobs, drop the timers, and end the thread; return whether the thread has ended in time.

        A job that blocks may keep the thread alive; the remaining jobs run afterwards. On the thread itself the method
        returns at once.
        """
        last: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = True
        self._jobs.put(partial(last.put, None))
        try:
            self._unstarted.pop()
        except IndexError:  # The thread was started, or closed by an earlier call.
            if self._ended:
                self._run_remaining()
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
        while (job := self._wait_for_job()) is not None:
            self._run_reporting(job)
            del job  # A waiting thread mustn't keep the objects of the job alive.
        self._finish()

    def _finish(self) -> None:
        self._ended = True  # Set before the queue's last check, so that a later `call_soon` runs the job directly.
        self._new_timers.clear()
        self._timers.clear()
        self._run_remaining()

    def _run_remaining(self) -> None:
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    self._run_reporting(job)

    def _run_reporting(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            try:
                self._on_fault(error)
            except BaseException:  # The owner's handler has failed, too.
                report_exception()

    def _wait_for_job(self) -> Callable[[], object] | None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                if self._closing:
                    return None
                if (due := self._pop_due()) is not None:
                    return due
                with suppress(queue.Empty):
                    job = self._jobs.get(timeout=min(_LOOKS_EVERY_S, max(0.0, self._next_look - time.monotonic())))
                    if job is not None:
                        return job
            else:
                if job is not None:
                    return job

    def _pop_due(self) -> Callable[[], object] | None:
        while True:
            if len(self._timers) > self._swept:  # Remove cancelled timers, which may have piled up.
                self._timers = [entry for entry in self._timers if entry[2].job is not None]
                heapq.heapify(self._timers)
                self._swept = max(_SWEEP, 2 * len(self._timers))
            while self._timers and self._timers[0][2].job is None:
                heapq.heappop(self._timers)
            # Set this before checking `_new_timers`, because `call_later` appends there before reading `_next_look`.
            self._next_look = self._timers[0][0] if self._timers else math.inf
            if not self._new_timers:
                break
            with suppress(IndexError):
                while True:
                    entry = self._new_timers.popleft()
                    if entry[2].job is not None:
                        heapq.heappush(self._timers, entry)
        if self._next_look > time.monotonic():
            return None
        timer = heapq.heappop(self._timers)[2]
        return timer.job  # The job is None if the timer was just cancelled; the caller then looks again.


def get_message(error: BaseException) -> str:
    """Return the message of an exception, even if a user's `__str__` raises."""
    try:
        return str.__str__(str(error))  # A user's `__str__` may return a subclass of str.
    except BaseException as fault:
        return f"<its __str__ raised {type(fault).__name__}>"


def format_error(error: BaseException) -> str:
    message = get_message(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


OUR_FAULT = "That is a fault of colocate's own: please report it, with the traceback that was printed"


def report_exception() -> None:
    """Report the current exception by `threading.excepthook`, like an exception that ends a thread."""
    kind, value, trace = sys.exc_info()
    if kind is not None:
        with suppress(BaseException):  # The hook may be a user's and raise, but this thread must continue.
            threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))


_T = TypeVar("_T")
_R = TypeVar("_R")


def map_on_threads(do: Callable[[_T], _R], items: Sequence[_T], most: int) -> list[_R]:
    """Apply a function to each item on several threads; return the results in order.

    All threads have finished when the first error is raised. The caller's thread takes part, and does all the work if
    no thread can start. Without memory `threading.Thread.start` and thread pools would wait for ever.

    Args:
        do: The function; should release the GIL.
        items: The items.
        most: The maximum number of threads; never more than processors.
    """
    from concurrent.futures import Future, wait  # The import is slow, and rarely needed.

    futures: list[Future[_R]] = [Future() for _ in items]
    pending = deque(zip(futures, items, strict=True))

    def work() -> None:
        while pending:
            try:
                future, item = pending.popleft()
            except IndexError:  # Another thread has removed the last item.
                return
            try:
                future.set_result(do(item))
            except BaseException as error:  # The calling thread raises this error at the end.
                future.set_exception(error)

    with contextlib.suppress(RuntimeError, MemoryError):  # If no thread can start, this thread does all the work.
        for _ in range(min(most, len(os.sched_getaffinity(0)), len(items)) - 1):
            _thread.start_new_thread(work, ())
    work()
    wait(futures)
    return [outcome.result() for outcome in futures]
