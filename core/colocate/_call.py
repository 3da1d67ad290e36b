"""`Call`: one method call on its ranks, as the driver holds it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from colocate._numbers import limit
from colocate._off_main import SLICE_S, Flag, on_main
from colocate._on_driver import OnDriver
from colocate.errors import ColocateError

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
_Outcome: TypeAlias = tuple[Any, BaseException | None, TracebackType | None]


class Call(OnDriver, Generic[C_co]):
    """A submitted call. The value is collected by whoever asks first, never on a worker's or an I/O thread."""

    _instead = "Give its result() instead"
    __slots__ = (
        "_callbacks",
        "_collecting",
        "_error",
        "_joiner",
        "_outcomes",
        "_raw",
        "_settled",
        "_trace",
        "label",
    )

    def __init__(self, label: str) -> None:
        self.label = label
        self._settled = Flag()
        self._collecting = threading.Lock()
        self._raw: Any = None
        self._joiner: Callable[..., Any] | None = None
        self._outcomes: list[_Outcome] = []  # the first one counts
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None  # of a collect that failed
        self._callbacks: list[tuple[Callable[[Call[C_co]], object], bool]] = []  # and whether it is the framework's

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error is not None else "done"
        return f"<Call {self.label} {state}>"

    def cancel(self) -> bool:
        """Withdraw the call from all ranks, if none has begun it.

        One that has been begun goes on; its method finds `ctx.cancelled` true and may return early.

        Returns:
            Whether it was withdrawn: its result is then a `CallCancelled`.
        """
        return False

    def done(self) -> bool:
        """True once it has a result or an error."""
        return self._settled.is_set

    def result(self, timeout: float | None = None) -> C_co:
        """Wait for the collected value.

        Args:
            timeout: Seconds to wait at most; None and `math.inf` wait for ever.

        Raises:
            TimeoutError: It isn't done yet; the call goes on.
            ColocateError: What went wrong with the call.
        """
        self._wait(limit(timeout, "result(timeout)"))
        if self._error is None:
            self._collect_once()
            value: C_co
            value, self._error, self._trace = self._outcomes[0]
            if self._error is None:
                return value
        cause: BaseException | None = self._error
        while cause is not None:  # looked at now: what prints it may not be Python code
            cause = cause.__cause__
        # Otherwise each raise would add to the traceback of the one before, and keep all of their frames.
        raise self._error.with_traceback(self._trace)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error instead of raising it; None when there is none."""
        timeout = limit(timeout, "exception(timeout)")
        try:
            self.result(timeout)
        except TimeoutError:
            if not self.done():
                raise
        except BaseException as error:
            if error is not self._error:  # an interrupt of the waiting thread isn't the call's
                raise
        return self._error

    def add_done_callback(self, callback: Callable[[Call[C_co]], object]) -> None:
        """Run `callback(call)` once it is done, on the runtime's dispatcher thread."""
        self._add(callback, False)

    def _then(self, callback: Callable[[Call[C_co]], object]) -> None:
        """Run a callback of the framework's own once it is done: never behind users' callbacks. It must not block."""
        self._add(callback, True)

    def _add(self, callback: Callable[[Call[C_co]], object], own: bool) -> None:
        self._callbacks.append((callback, own))
        # Settling takes the list after it set the flag: one of the two sees the callback, and `_pop` gives it out once.
        if self.done():
            self._run_callbacks()

    def __await__(self) -> Generator[Any, None, C_co]:
        self._check_unsent(awaits=True)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def notify(call: Call[C_co]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits it
                loop.call_soon_threadsafe(wake)

        self._then(notify)
        yield from future
        return self.result()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and can't be sent; pass its result(), or keep it and pass .ref")

    # -- for the group that settles it

    def _wait(self, timeout: float | None) -> None:
        if not self._settled.wait(timeout):
            raise TimeoutError(f"{self.label} isn't done after {timeout} s; the call goes on")

    def _check_unsent(self, *, awaits: bool = False) -> None:
        """Raise when waiting for it would wait for the very code that waits: only a pipeline's calls do."""

    def _collect_once(self) -> None:
        """Collect the value, unless somebody has."""
        if self._outcomes:
            return
        if on_main():  # which holds nothing: a signal's handler may ask for the same value, and has it collected then
            self._collect()
            return
        with self._collecting:
            self._collect()

    def _collect(self) -> None:
        raw, joiner = self._raw, self._joiner
        if self._outcomes:  # looked for afterwards: what there is is dropped once it has been collected
            return
        outcome: _Outcome
        try:
            outcome = self._joined(raw, joiner), None, None
        except Exception as error:
            outcome = None, error, error.__traceback__
        self._outcomes.append(outcome)
        self._raw = self._joiner = None

    def _joined(self, raw: Any, joiner: Callable[..., Any] | None) -> Any:
        return raw if joiner is None else joiner(raw)

    def _settle(self, raw: Any, joiner: Callable[..., Any] | None = None) -> bool:
        """Give it its results; False when it was settled already. The caller holds the lock that orders settling."""
        if self.done():
            return False
        self._raw, self._joiner = raw, joiner
        self._settled.set()
        if self._callbacks:
            self._run_callbacks()
        return True

    def _fail(self, error: BaseException) -> bool:
        """Give it its error; False when it was settled already. The caller holds the lock that orders settling."""
        if self.done():
            return False
        self._error = error
        self._settled.set()
        if self._callbacks:
            self._run_callbacks()
        return True

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback, own = self._callbacks.pop(0)
            except IndexError:  # another thread took the last one
                return
            self._dispatch(callback, own)

    def _dispatch(self, callback: Callable[[Call[C_co]], object], own: bool) -> None:
        callback(self)


def settled(label: str, value: C) -> Call[C]:
    """A call that is done."""
    call: Call[C] = Call(label)
    call._settle(value)
    return call


def failed(label: str, error: BaseException) -> Call[Any]:
    """A call that has failed."""
    call: Call[Any] = Call(label)
    call._fail(error)
    return call


def wait(calls: Iterable[Call[Any]], timeout: float | None = None) -> tuple[set[Call[Any]], set[Call[Any]]]:
    """Wait until all calls are done, or the time is up.

    Args:
        calls: The calls.
        timeout: Seconds to wait at most; None and `math.inf` wait for ever.

    Returns:
        The calls that are done, and those that aren't.
    """
    timeout = limit(timeout, "wait(timeout)")
    everything = list(calls)
    deadline = None if timeout is None else time.monotonic() + timeout
    for call in everything:
        try:
            call._wait(None if deadline is None else deadline - time.monotonic())
        except TimeoutError:
            break
    return {c for c in everything if c.done()}, {c for c in everything if not c.done()}


def as_completed(calls: Iterable[Call[C]], timeout: float | None = None) -> Iterator[Call[C]]:
    """The calls in the order in which they are done.

    Args:
        calls: The calls; each is given once.
        timeout: Seconds to wait at most, over all of them.

    Raises:
        TimeoutError: Some aren't done in time; the calls go on.
    """
    return _as_completed(calls, limit(timeout, "as_completed(timeout)"))


def _as_completed(calls: Iterable[Call[C]], timeout: float | None) -> Iterator[Call[C]]:
    pending = set(calls)
    finished: queue.SimpleQueue[Call[C]] = queue.SimpleQueue()
    for call in pending:
        call._check_unsent()
        call._then(finished.put)
    deadline = None if timeout is None else time.monotonic() + timeout
    while pending:
        left = SLICE_S if deadline is None else deadline - time.monotonic()
        try:
            call = finished.get(timeout=max(0.0, min(left, SLICE_S)))
        except queue.Empty:
            if left <= 0:
                raise TimeoutError(f"{len(pending)} calls aren't done after {timeout} s; they go on") from None
            continue
        pending.discard(call)
        yield call


def unsettled_error(call: Call[Any]) -> ColocateError | None:
    """The error of a call that has failed, without waiting."""
    error = call._error
    return error if isinstance(error, ColocateError) else None
