"""Interruptible waits, and threads that run long operations in place of the main thread.

The main thread hands over connecting, spawning, closing and other work that goes on though its wait is interrupted. A
signal's handler that raises there ends the wait at once, while the work ends on its own thread.

On all other threads `run_deferred` runs its work here and now: no signal comes there. When handlers run is decided in
`guard.py`.
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

from colocate._signals.guard import interruptible, on_main

T = TypeVar("T")
# A signal that comes just before a lock is waited for is seen only when that ends: so it is waited for in slices.
SLICE_S = 1.0


@interruptible
def wait_for(lock: _thread.LockType, seconds: float) -> None:
    """Wait for a lock that this thread alone waits for, and nobody holds for anything."""
    lock.acquire(timeout=seconds)


class Flag:
    """Set once, and waited for. As `threading.Event`, but an interrupted wait leaves nothing behind.

    The flag is the truth, and each waiter has a raw lock of its own that only wakes it up.
    """

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: list[_thread.LockType] = []

    def set(self) -> None:
        """Set it, and wake all."""
        self.is_set = True
        try:
            while self._waiting:
                self._waiting.pop().release()
        except IndexError:  # another thread has woken the last one
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most so many seconds; whether it is."""
        if self.is_set:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        wake = _thread.allocate_lock()
        wake.acquire()
        self._waiting.append(wake)
        while not self.is_set:  # again, as it may have been set before this one was there to be woken
            left = SLICE_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                with contextlib.suppress(ValueError):  # just now
                    self._waiting.remove(wake)
                break
            wait_for(wake, min(left, SLICE_S))
        return self.is_set


class _Job(Generic[T]):
    """Some work, from the main thread's handing it over to its end."""

    __slots__ = ("_context", "_frame", "done", "error", "value", "work")

    def __init__(self, work: Callable[[], T], frame: FrameType | None) -> None:
        self.work: Callable[[], T] | None = work  # None once it is begun, or withdrawn
        self._frame = frame
        self._context = copy_context()
        self.done = Flag()
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self, work: Callable[[], T]) -> None:
        """Do the work. On a courier's thread."""
        _here.frame = self._frame
        try:
            self.value = self._context.run(work)
        except BaseException as error:
            trace = error.__traceback__
            self.error = error.with_traceback(None if trace is None else trace.tb_next)  # without this frame
            del trace
        # Nothing of the user's is held any more when who waits goes on.
        _here.frame = self._frame = None
        del work, self._context


class _Couriers:
    """The threads that work for the main thread.

    A job, which may take long, never waits for another one: an idle thread does it, or a new one. A few idle threads
    stay; others end, unless they have started processes, which the kernel may tie to the thread that has.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._idle = 0
        self._unfinished: dict[_Job[Any], None] = {}  # from the handing over of a job to its end

    def put(self, job: _Job[Any]) -> bool:
        """Hand a job over; False when no other thread runs any more, or can be started: the interpreter ends."""
        if sys.is_finalizing():
            return False
        with self._lock:
            if not self._idle:
                try:
                    _thread.start_new_thread(self._main, ())
                except RuntimeError:
                    return False
                self._idle += 1
            self._idle -= 1
            self._unfinished[job] = None
            self._jobs.put(job)
        return True

    def take(self, job: _Job[T]) -> Callable[[], T] | None:
        """Take the work out of a job, to begin or to withdraw it; None when that was done before."""
        with self._lock:
            work, job.work = job.work, None
        return work

    def withdraw(self, job: _Job[Any]) -> bool:
        """Withdraw a job; False when it has been begun."""
        if self.take(job) is None:
            return False
        self._unfinished.pop(job, None)
        return True

    def settle(self, timeout: float) -> bool:
        """Wait until all jobs that have been put are done; whether they are."""
        until = time.monotonic() + timeout
        return all(job.done.wait(until - time.monotonic()) for job in list(self._unfinished))

    def _main(self) -> None:
        threading.current_thread().name = f"{COURIER}{next(self._numbers)}"
        while True:
            job = self._jobs.get()
            if (work := self.take(job)) is not None:
                job.run(work)
                self._unfinished.pop(job, None)
                job.done.set()
            del job, work
            with self._lock:
                if self._idle >= _WAIT and not _has_started_processes():
                    break
                self._idle += 1
        threading.current_thread()._delete()  # type: ignore[attr-defined]  # `threading` lists it for ever otherwise


def _has_started_processes() -> bool:
    """Whether this thread has some that run, as far as the kernel tells."""
    try:
        with open(f"/proc/self/task/{_thread.get_native_id()}/children", "rb") as children:
            return bool(children.read(1))
    except OSError:
        return True


_WAIT = 2  # as many couriers wait at most: one that ends with each job would be one that starts with each
COURIER = "colocate-courier-"
_here = threading.local()
_couriers = _Couriers()


def _forget_fork() -> None:
    """In a forked child the couriers are gone."""
    global _couriers
    _couriers = _Couriers()


os.register_at_fork(after_in_child=_forget_fork)


def frames() -> Iterator[FrameType]:
    """Yield the caller's frames, the innermost first; then, on a courier, those of whom it works for."""
    frame: FrameType | None = sys._getframe(1)
    other: FrameType | None = getattr(_here, "frame", None)
    while frame is not None:
        yield frame
        frame = frame.f_back
        if frame is None:
            frame, other = other, None


def who_waits() -> threading.Thread:
    """Return this thread; on a courier the one that it works for, which waits for that."""
    return threading.current_thread() if getattr(_here, "frame", None) is None else threading.main_thread()


def run_deferred(
    work: Callable[[], T],
    interrupted: Callable[[], object] | None = None,
    waits_s: float | None = 0.0,
    in_any_case: bool = False,
) -> T:
    """Do some work on a thread that isn't the main one, and wait for it.

    Args:
        work: What takes long, or has to come to its end.
        interrupted: Called on a third thread when the wait is interrupted, to have the work end soon, or to undo it. It
            always goes on to its end, unless it had not begun.
        waits_s: How long both ends are waited for then, at most; None for as long as it takes. A second interruption
            ends that too.
        in_any_case: Whether it is done also when the interruption comes before it has begun.

    Raises:
        BaseException: What the work raises, or the handler of a signal.
    """
    if not on_main():
        return work()
    job = _Job(work, sys._getframe(1))
    if not _couriers.put(job):
        return work()
    try:
        job.done.wait()
    except BaseException:
        if in_any_case or not _couriers.withdraw(job):
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
        del error  # its traceback has this frame


def defer(work: Callable[[], object]) -> Flag | None:
    """Do some work on a thread that isn't the main one, without waiting. What it raises is reported.

    Returns:
        What is set when it is done; None if it has been done here.
    """

    def reported() -> None:
        try:
            work()
        except BaseException as error:
            args = type(error), error, error.__traceback__, threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs(args))

    job = _Job(reported, sys._getframe(1))
    if on_main() and _couriers.put(job):
        return job.done
    reported()
    return None


def settle(timeout: float) -> bool:
    """Wait for work that nobody waits for, as at the interpreter's exit; whether all of it has ended."""
    return _couriers.settle(timeout)
