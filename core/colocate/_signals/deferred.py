"""Run long operations outside the main thread, so that signal handlers can interrupt the main thread's wait.

The main thread hands over connecting, spawning, closing and other work that must continue when the wait is interrupted.
A signal handler that raises ends the wait at once, while the work ends on its own thread.

On all other threads `run_deferred` runs the work directly: no signal comes there. `guard.py` decides when handlers run.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from types import FrameType
from typing import Any, Generic, TypeVar

from colocate._signals.guard import interruptible, is_on_main

T = TypeVar("T")
# Long waits are split into slices: a signal just before the wait for a lock is handled only after the wait.
SLICE_S = 1.0


@interruptible
def wait_for_lock(lock: _thread.LockType, seconds: float) -> None:
    """Wait at most `seconds` until another thread releases a raw lock, which wakes this thread."""
    lock.acquire(timeout=seconds)


class Flag:
    """An event to wait for, like `threading.Event`, but safe against interrupted waits.

    `is_set` has the state; each waiter has a raw lock of its own, which only wakes the waiter.
    """

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: list[_thread.LockType] = []

    def set(self) -> None:
        self.is_set = True
        try:
            while self._waiting:
                self._waiting.pop().release()
        except IndexError:  # Another thread has just woken the last waiter.
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most `timeout` seconds; return whether the flag is set."""
        if self.is_set:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        wake = _thread.allocate_lock()
        wake.acquire()
        self._waiting.append(wake)
        while not self.is_set:  # Check again, because `set` may have missed this waiter.
            remaining = SLICE_S if deadline is None else deadline - time.monotonic()
            if remaining <= 0:
                with contextlib.suppress(ValueError):  # `set` may have removed the lock just now.
                    self._waiting.remove(wake)
                break
            wait_for_lock(wake, min(remaining, SLICE_S))
        return self.is_set


class _Job(Generic[T]):
    """Work that the main thread has handed to another thread, and the result or exception."""

    __slots__ = ("_context", "_frame", "done", "error", "value", "work")

    def __init__(self, work: Callable[[], T], frame: FrameType | None) -> None:
        self.work: Callable[[], T] | None = work  # None once the work has begun or was withdrawn.
        self._frame = frame
        self._context = copy_context()
        self.done = Flag()
        self.value: T | None = None
        self.error: BaseException | None = None

    def run_work(self, work: Callable[[], T]) -> None:
        _here.frame = self._frame
        try:
            self.value = self._context.run(work)
        except BaseException as error:
            trace = error.__traceback__
            # Remove this method's frame from the traceback.
            self.error = error.with_traceback(None if trace is None else trace.tb_next)
            del trace
        # Release users' objects before the waiting thread continues.
        _here.frame = self._frame = None
        del work, self._context


class _Couriers:
    """The threads ("couriers") that run jobs for the main thread.

    Jobs never wait for each other, because they may take long: each gets an idle thread, or a new one. A few idle
    threads stay. Others end, unless they have started processes, which the kernel may tie to the thread.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._idle_count = 0
        self._unfinished: dict[_Job[Any], None] = {}  # Jobs that haven't ended, in the order of submission.

    def put_job(self, job: _Job[Any]) -> bool:
        """Hand a job to a courier; return False if no thread can start, or the interpreter is ending."""
        if sys.is_finalizing():
            return False
        with self._lock:
            if not self._idle_count:
                try:
                    _thread.start_new_thread(self._main, ())
                except RuntimeError:
                    return False
                self._idle_count += 1
            self._idle_count -= 1
            self._unfinished[job] = None
            self._jobs.put(job)
        return True

    def take(self, job: _Job[T]) -> Callable[[], T] | None:
        """Remove and return a job's work, to run or to drop; None if the work was removed before."""
        with self._lock:
            work, job.work = job.work, None
        return work

    def withdraw_job(self, job: _Job[Any]) -> bool:
        if self.take(job) is None:
            return False
        self._unfinished.pop(job, None)
        return True

    def wait_until_done(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        return all(job.done.wait(until - time.monotonic()) for job in list(self._unfinished))

    def _main(self) -> None:
        threading.current_thread().name = f"{COURIER}{next(self._numbers)}"
        while True:
            job = self._jobs.get()
            if (work := self.take(job)) is not None:
                job.run_work(work)
                self._unfinished.pop(job, None)
                job.done.set()
            del job, work
            with self._lock:
                if self._idle_count >= _WAIT and not _has_started_processes():
                    break
                self._idle_count += 1
        threading.current_thread()._delete()  # type: ignore[attr-defined]  # `threading` lists it for ever otherwise


def _has_started_processes() -> bool:
    try:
        with open(f"/proc/self/task/{_thread.get_native_id()}/children", "rb") as children:
            return bool(children.read(1))
    except OSError:
        return True


_WAIT = 2  # Up to two idle couriers stay, so that most jobs needn't start a thread.
COURIER = "colocate-courier-"
_here = threading.local()
_couriers = _Couriers()


def _reset_after_fork() -> None:
    global _couriers
    _couriers = _Couriers()


os.register_at_fork(after_in_child=_reset_after_fork)


def iter_frames() -> Iterator[FrameType]:
    """Yield the caller's frames, innermost first. On a courier, the waiting main thread's frames follow."""
    frame: FrameType | None = sys._getframe(1)
    other: FrameType | None = getattr(_here, "frame", None)
    while frame is not None:
        yield frame
        frame = frame.f_back
        if frame is None:
            frame, other = other, None


def get_waiting_thread() -> threading.Thread:
    """Return the thread that waits for the current work: on a courier the main thread, otherwise this thread."""
    return threading.current_thread() if getattr(_here, "frame", None) is None else threading.main_thread()


def run_deferred(
    work: Callable[[], T],
    interrupted: Callable[[], object] | None = None,
    waits_s: float | None = 0.0,
    in_any_case: bool = False,
) -> T:
    """Run some work and wait for the end. On the main thread, a helper thread (a courier) runs the work.

    Args:
        work: Work that takes long, or must not be interrupted.
        interrupted: Called on a third thread if the wait is interrupted, to end the work soon, or to undo it. Work
            that has begun always runs to its end.
        waits_s: Seconds to wait for `work` and `interrupted` after an interruption; None for no limit. A second
            interruption ends that wait, too.
        in_any_case: Whether to do the work also if the interruption comes before the start.

    Raises:
        BaseException: The exception of the work, or of a signal handler.
    """
    if not is_on_main():
        return work()
    job = _Job(work, sys._getframe(1))
    if not _couriers.put_job(job):
        return work()
    try:
        job.done.wait()
    except BaseException:
        if in_any_case or not _couriers.withdraw_job(job):
            until = None if waits_s is None else time.monotonic() + waits_s
            for done in (None if interrupted is None else defer(interrupted), job.done):
                if done is not None:
                    done.wait(None if until is None else until - time.monotonic())
        raise
    if job.error is None:
        return job.value  # type: ignore[return-value]
    error, job.error = job.error, None
    try:
        raise error
    finally:
        del error  # This breaks the reference cycle of traceback and frame.


def defer(work: Callable[[], object]) -> Flag | None:
    """Hand the main thread's work to a courier without waiting, or run other threads' work directly.

    Exceptions are reported, not raised.

    Returns:
        A flag that is set when the work has ended; None if this thread has run the work.
    """

    def reported() -> None:
        try:
            work()
        except BaseException as error:
            args = type(error), error, error.__traceback__, threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs(args))

    job = _Job(reported, sys._getframe(1))
    if is_on_main() and _couriers.put_job(job):
        return job.done
    reported()
    return None


def wait_until_done(timeout: float) -> bool:
    """Wait until couriers have finished all work, at most `timeout` seconds; return whether all has ended."""
    return _couriers.wait_until_done(timeout)
