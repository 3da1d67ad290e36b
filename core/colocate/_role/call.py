"""`Call`: one method call on its ranks, as the driver holds it."""

from __future__ import annotations

import _thread
import contextlib
import copy
import queue
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from colocate._role.on_driver import OnDriver
from colocate._signals.at_work import refuse_to_wait
from colocate._signals.off_main import SLICE_S, Flag, on_main
from colocate._system.deadline import Deadline
from colocate._system.numbers import limit
from colocate.errors import ColocateError

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
_Outcome: TypeAlias = tuple[Any, BaseException | None, TracebackType | None]


class Underway(Flag):
    """A call that has been made: it is settled once, by its results or an error.

    The value is collected by whoever asks first, never on a worker's or an I/O thread.
    """

    __slots__ = ("_callbacks", "_collecting", "_error", "_joiner", "_outcomes", "_raised", "_raw", "_trace", "label")

    def __init__(self, label: str) -> None:
        self.is_set = False
        self._waiting = []
        self.label = label
        self._collecting = _thread.allocate_lock()
        self._raw: Any = None
        self._joiner: Callable[..., Any] | None = None
        self._outcomes: list[_Outcome] = []  # the first one counts
        self._error: BaseException | None = None
        self._raised: dict[int, ColocateError] | None = None  # by thread, as a traceback belongs to one
        self._trace: TracebackType | None = None  # of a collect that failed
        self._callbacks: list[tuple[Callable[[Any], object], bool]] = []  # and whether it is the framework's

    @property
    def state(self) -> str:
        """Whether there is an answer, in a word."""
        return "pending" if not self.done() else "failed" if self._error is not None else "done"

    def cancel(self) -> bool:
        """See `Call.cancel`."""
        return False

    def done(self) -> bool:
        """True once it has a result or an error."""
        return self.is_set

    def result(self, timeout: float | None = None) -> Any:
        """See `Call.result`."""
        self._wait(None if timeout is None else limit(timeout, "result(timeout)"))
        error = self._failure()
        if error is None:
            return self._outcomes[0][0]
        try:
            # Otherwise each raise would add to the traceback of the one before, and keep all of their frames.
            raise error.with_traceback(self._trace)
        finally:
            del self, error  # a cycle of error, frame and call would keep what role code held until it is collected

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Call.exception`."""
        self._wait(limit(timeout, "exception(timeout)"))
        return self._failure()

    def _failure(self) -> BaseException | None:
        """What it failed with, when it is done; collects the value first, which may be what fails."""
        if self._error is None:
            if not self._outcomes:
                self._collect_once()
            _, self._error, self._trace = self._outcomes[0]
            if self._error is None:
                return None
        cause: BaseException | None = self._error
        while cause is not None:  # looked at now: what prints it may not be Python code
            cause = cause.__cause__
        error = self._error
        if not isinstance(error, ColocateError):
            return error
        error._told = True
        if self._raised is None:
            self._raised = {}
        raised = self._raised.get(here := _thread.get_ident())
        if raised is None:  # other calls may end with the same
            raised = self._raised[here] = copy.copy(error)
        return raised

    def _then(self, callback: Callable[[Any], object], own: bool = True) -> None:
        """Run `callback(self)` once it is done.

        Args:
            callback: What to run. It must not block.
            own: Whether it is the framework's own, which never runs behind users' callbacks.
        """
        self._callbacks.append((callback, own))
        # Settling takes the list after it set the flag: one of the two sees the callback, and `_pop` gives it out once.
        if self.done():
            self._run_callbacks()

    # -- for the group that settles it

    def _wait(self, timeout: float | None) -> None:
        if not self.is_set and not self.wait(timeout):
            raise TimeoutError(f"{self.label} isn't done after {timeout} s; the call goes on")

    def _refuse_to_wait(self) -> None:
        """Raise where waiting for it would keep the framework from its work."""
        if not self.done():
            refuse_to_wait(self.label)

    def _check_unsent(self, *, awaits: bool = False) -> None:
        """Raise when waiting for it would wait for the very code that waits: only a pipeline's calls do."""

    def _collect_once(self) -> None:
        """Collect the value, unless somebody has."""
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
        if self.is_set:
            return False
        self._raw, self._joiner = raw, joiner
        self.set()
        if self._callbacks:
            self._run_callbacks()
        return True

    def _fail(self, error: BaseException) -> bool:
        """Give it its error; False when it was settled already. The caller holds the lock that orders settling."""
        if self.is_set:
            return False
        self._error = error
        self.set()
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

    def _dispatch(self, callback: Callable[[Any], object], own: bool) -> None:
        callback(self)


class Call(OnDriver, Generic[C_co]):
    """A submitted call. The value is collected by whoever asks first, never on a worker's or an I/O thread."""

    _instead = "Give its result() instead"
    __slots__ = ("_underway",)

    def __init__(self, underway: Underway) -> None:
        """Use `view.method.submit(...)`."""
        self._underway = underway

    def __repr__(self) -> str:
        return f"<Call {self.label} {self._underway.state}>"

    @property
    def label(self) -> str:
        """Role and method, as errors name it."""
        return self._underway.label

    def cancel(self) -> bool:
        """Withdraw the call from all ranks, if none has begun it.

        One that has been begun goes on; its method finds `ctx.cancelled` true and may return early.

        Returns:
            Whether it was withdrawn: its result is then a `CallCancelled`.
        """
        return self._underway.cancel()

    def done(self) -> bool:
        """True once it has a result or an error."""
        return self._underway.done()

    def result(self, timeout: float | None = None) -> C_co:
        """Wait for the collected value.

        Args:
            timeout: Seconds to wait at most; None and `math.inf` wait for ever.

        Raises:
            TimeoutError: It isn't done yet; the call goes on.
            ColocateError: What went wrong with the call.
        """
        self._underway._refuse_to_wait()
        try:
            value: C_co = self._underway.result(timeout)
        finally:
            del self  # as there
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error instead of raising it; None when there is none."""
        self._underway._refuse_to_wait()
        return self._underway.exception(timeout)

    def add_done_callback(self, callback: Callable[[Call[C_co]], object]) -> None:
        """Run `callback(call)` once it is done, on the runtime's dispatcher thread.

        Raises:
            TypeError: It can't be called, or is that of `asyncio.wait`, which takes futures of its loop only.
        """
        if not callable(callback):
            raise TypeError(f"add_done_callback() takes a function of the call, not {callback!r}")
        if getattr(callback, "__module__", None) == "asyncio.tasks":  # on another thread it would wake up nobody
            raise TypeError(
                f"asyncio.wait() takes futures and tasks, and {self!r} is neither: give it "
                "asyncio.ensure_future(call), or wait by asyncio.gather(*calls) or colocate.wait(calls)"
            )
        self._underway._then(lambda _: callback(self), own=False)

    def __await__(self) -> Generator[Any, None, C_co]:
        import asyncio  # takes a tenth of a driver's start, and most await nothing

        underway = self._underway
        underway._check_unsent(awaits=True)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def notify(_: Underway) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits it
                loop.call_soon_threadsafe(wake)

        underway._then(notify)
        yield from future
        try:
            return self.result()
        finally:
            del self, underway  # as there

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and can't be sent; pass its result(), or keep it and pass .ref")


def settled(label: str, value: C) -> Call[C]:
    """A call that is done."""
    underway = Underway(label)
    underway._settle(value)
    return Call(underway)


def failed(label: str, error: BaseException) -> Call[Any]:
    """A call that has failed."""
    underway = Underway(label)
    underway._fail(error)
    return Call(underway)


def wait(calls: Iterable[Call[C]], timeout: float | None = None) -> tuple[set[Call[C]], set[Call[C]]]:
    """Wait until all calls are done, or the time is up.

    Args:
        calls: The calls.
        timeout: Seconds to wait at most; None and `math.inf` wait for ever.

    Returns:
        The calls that are done, and those that aren't.
    """
    timeout = limit(timeout, "wait(timeout)")
    everything = _only_calls(calls, "wait()")
    deadline = Deadline(timeout)
    for call in everything:
        try:
            call._underway._wait(deadline.left)
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
    return _as_completed(_only_calls(calls, "as_completed()"), limit(timeout, "as_completed(timeout)"))


def _only_calls(calls: Iterable[Call[C]], what: str) -> list[Call[C]]:
    everything = list(calls)
    for call in everything:
        if not isinstance(call, Call):
            raise TypeError(f"{what} takes calls, as submit() gives them, not {call!r}; a resident has a wait() itself")
    return everything


def _as_completed(calls: Iterable[Call[C]], timeout: float | None) -> Iterator[Call[C]]:
    pending = set(calls)
    finished: queue.SimpleQueue[Call[C]] = queue.SimpleQueue()

    def tell(call: Call[C]) -> None:
        call._underway._then(lambda _: finished.put(call))

    for call in pending:
        call._underway._check_unsent()
        tell(call)
    deadline = Deadline(timeout)
    while pending:
        try:
            call = finished.get(timeout=deadline.at_most(SLICE_S))
        except queue.Empty:
            if deadline.is_over:
                raise TimeoutError(f"{len(pending)} calls aren't done after {timeout} s; they go on") from None
            continue
        pending.discard(call)
        yield call
