"""The driver's handles for method calls (`Call`) and for results kept on workers (`Resident`)."""

from __future__ import annotations

import _thread
import abc
import copy
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeAlias, TypeVar

import attrs

from colocate._signals.arrivals import Arrivals
from colocate._signals.deferred import SLICE_S, Flag
from colocate._signals.guard import calls_users_code
from colocate._signals.in_framework import check_may_wait
from colocate._system.deadline import Deadline
from colocate._system.jobs import get_message
from colocate._system.numbers import parse_limit
from colocate._system.tracebacks import is_of_handler
from colocate._values.leaves import map_leaves
from colocate._values.nesting import find_nesting_error
from colocate.errors import ColocateError, SerializationError

_log = logging.getLogger("colocate")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)
INSTEAD_OF_RESIDENT = "Give the constructor the value (.fetch()), or pass this to a method of the role"
_Outcome: TypeAlias = tuple[Any, BaseException | None, TracebackType | None]


class DriverObject:
    """Base class of all objects that users hold on the driver: runtimes, pools, groups, views, calls, residents."""

    __slots__ = ()

    _instead: ClassVar[str] = "Inside a worker, ctx.sibling(name, cls) returns another role"
    """Advice for a user who gives such an object to a role."""
    _unsent: ClassVar[str] = "; in a worker use ctx.sibling(name, cls)"
    """Advice for a user who pickles such an object."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} lives on the driver and can't be sent{self._unsent}")


def lives_on_driver(kind: type) -> bool:
    """Return whether values of a type only work on the driver. Of these, only residents can be arguments."""
    return issubclass(kind, DriverObject)


def refuse_in_constructor(arguments: Mapping[str, Any], what: str) -> None:
    """Refuse constructor arguments of a role that contain driver objects, or that contain themselves."""
    for name, value in arguments.items():

        def refuse(item: Any, name: str = name) -> NoReturn:
            raise SerializationError(
                f"{what}: {name} can't be sent: it has {item!r}, which lives on the driver. {item._instead}",
                argument=name,
                path=name,
            )

        try:
            map_leaves(value, refuse, lives_on_driver)
        except RecursionError:
            raise find_nesting_error(what, name) from None


class CallFuture(Flag):
    """A call in progress, which is settled once, with results or an error.

    The first thread that asks for the value collects it. Worker threads and I/O threads never collect values.
    """

    __slots__ = ("_callbacks", "_collecting", "_error", "_outcomes", "_raised", "_raw", "_trace", "handle", "label")

    def __init__(self, label: str) -> None:
        self.is_set = False
        self._waiting = []
        self.label = label
        self._collecting = _thread.RLock()
        self._raw: Any = None
        self._outcomes: list[_Outcome] = []  # Only the first outcome counts.
        self._error: BaseException | None = None
        # Maps each thread to a copy of the error, because a traceback belongs to one thread.
        self._raised: dict[int, ColocateError] | None = None
        self._trace: TracebackType | None = None  # Holds the traceback of a failed collect.
        # The flag is True for the framework's own callbacks.
        self._callbacks: list[tuple[Callable[[Any], object], bool]] = []
        # Refers to the user's handle until somebody asks for the outcome.
        self.handle: weakref.ref[Call[Any]] | None = None

    def cancel(self) -> bool:
        return False

    def done(self) -> bool:
        return self.is_set

    def result(self, timeout: float | None = None) -> Any:
        self._wait(None if timeout is None else parse_limit(timeout, "result(timeout)"))
        error = self._take_error()
        if error is None:
            return self._outcomes[0][0]
        try:
            # The traceback is reset, because each raise would extend the previous traceback and keep all frames alive.
            raise error.with_traceback(self._trace)
        finally:
            # Without this, a cycle of error, frame and call would keep values alive until a garbage collection.
            del self, error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(parse_limit(timeout, "exception(timeout)"))
        return self._take_error()

    def peek_error(self) -> BaseException | None:
        """Return the error of a finished call without marking the error as reported, for the framework's callbacks.

        The value is collected first, which may fail.
        """
        if self._error is None:
            if not self._outcomes:
                # The lock is reentrant, because a signal handler may ask for the same value while user code runs.
                with self._collecting:
                    self._collect()
            _, self._error, self._trace = self._outcomes[0]
        return self._error

    def _take_error(self) -> BaseException | None:
        """Return the error of a finished call, and mark the error as reported."""
        cause = error = self.peek_error()
        if error is None:
            return None
        # This unpickles all causes, because the code that prints a traceback later may be unable to do so.
        while cause is not None:
            cause = cause.__cause__
        if not isinstance(error, ColocateError):
            return error
        error._is_reported = True
        if self._raised is None:
            self._raised = {}
        raised = self._raised.get(thread_id := _thread.get_ident())
        if raised is None:  # The error is copied, because other calls may end with the same error.
            raised = self._raised[thread_id] = copy.copy(error)
        return raised

    def _attach_handle(self, handle: Call[Any]) -> None:
        """Record that a user holds a handle of the call."""

    def _add_callback(self, callback: Callable[[Any], object], own: bool = True) -> None:
        """Run a callback, which mustn't block, once the call is done.

        `own` marks callbacks of the framework, which never run behind users' callbacks.
        """
        self._callbacks.append((callback, own))
        # The settling thread sets the flag before reading the callbacks, so one of the two threads runs this callback.
        if self.done():
            self._run_callbacks()

    # -- for the group that settles it

    def _wait(self, timeout: float | None) -> None:
        if not self.is_set and not self.wait(timeout):
            raise TimeoutError(f"{self.label} isn't done after {timeout} s; the call continues")

    def _check_unsent(self, *, awaits: bool = False) -> None:
        """Raise if waiting would deadlock because the current code must send the call first, as in a pipeline."""

    def _check_wait(self, *, awaits: bool = False) -> None:
        """Raise if waiting would deadlock, because the call is unsent or waits for the current thread or task."""
        self._check_unsent(awaits=awaits)

    def _collect(self) -> None:
        raw = self._raw
        if self._outcomes:  # Checked after reading `_raw`, because the raw results are dropped once collected.
            return
        outcome: _Outcome
        try:
            outcome = self._join_results(raw), None, None
        except Exception as error:
            if is_of_handler(error):  # After a signal handler's error, the next caller gets the value.
                raise
            outcome = None, error, error.__traceback__
        self._outcomes.append(outcome)
        self._raw = None

    def _join_results(self, raw: Any) -> Any:
        """Return the value of the call, joined from the ranks' raw results."""
        return raw

    def _set_result(self, raw: Any) -> bool:
        """Settle the call with results; return False if settled before. Called under the lock that orders settling."""
        if self.is_set:
            return False
        self._raw = raw
        self.set()
        if self._callbacks:
            self._run_callbacks()
        return True

    def _set_error(self, error: BaseException) -> bool:
        """Settle the call with an error; return False if settled before. Called under the lock that orders settling."""
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
                callback, is_own = self._callbacks.pop(0)
            except IndexError:  # Another thread has taken the last callback.
                return
            self._dispatch(callback, is_own)

    @calls_users_code
    def _dispatch(self, callback: Callable[[Any], object], own: bool) -> None:
        callback(self)


class Call(DriverObject, Generic[C_co]):
    """The handle of a submitted call. The first thread that asks for the value collects it."""

    _instead = "Give its result() instead"
    _unsent = "; pass its result(), or keep it and pass .ref"
    __slots__ = ("__weakref__", "_underway")

    def __init__(self, underway: CallFuture) -> None:
        """Use `view.method.submit(...)` to create a call."""
        self._underway = underway
        underway._attach_handle(self)

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._underway._error is not None else "done"
        return f"<Call {self.label} {state}>"

    @property
    def label(self) -> str:
        """The role and method of the call, as in error texts."""
        return self._underway.label

    def cancel(self) -> bool:
        """Withdraw the call from all ranks, unless a rank has begun to run the call.

        A call that has begun continues. Its method finds `ctx.cancelled` true and may return early.

        Returns:
            Whether the call was withdrawn. The call then ends with a `CallCancelled`.
        """
        self._underway.handle = None
        return self._underway.cancel()

    def done(self) -> bool:
        """Return whether the call has a result or an error."""
        return self._underway.done()

    def result(self, timeout: float | None = None) -> C_co:
        """Wait for the end of the call, and return the collected value.

        Args:
            timeout: Seconds to wait at most; None and `math.inf` wait for ever.

        Raises:
            TimeoutError: The call isn't done yet, and continues.
            ColocateError: The call has failed.
        """
        self._wait(None if timeout is None else parse_limit(timeout, "result(timeout)"))
        try:
            value: C_co = self._underway.result()
        finally:
            del self  # This avoids a reference cycle, as in `CallFuture.result`.
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call's end, and return the error instead of raising; None if the call succeeded."""
        self._wait(parse_limit(timeout, "exception(timeout)"))
        return self._underway.exception()

    def _wait(self, timeout: float | None) -> None:
        with _OutcomeWait(self):
            if not self.done():
                check_may_wait(self.label)
            self._underway._wait(timeout)

    def add_done_callback(self, callback: Callable[[Call[C_co]], object]) -> None:
        """Run `callback(call)` when the call is done, on the runtime's dispatcher thread.

        Raises:
            TypeError: The callback isn't callable, or belongs to `asyncio.wait`, which takes futures of its loop
                only.
        """
        if not callable(callback):
            raise TypeError(f"add_done_callback() takes a function of the call, not {callback!r}")
        # A callback of asyncio can't wake the loop from another thread.
        if getattr(callback, "__module__", None) == "asyncio.tasks":
            raise TypeError(
                f"asyncio.wait() takes futures and tasks, and {self!r} is neither: give it "
                "asyncio.ensure_future(call), or wait by asyncio.gather(*calls) or colocate.wait(calls)"
            )
        self._underway.handle = None
        self._underway._add_callback(lambda _: callback(self), own=False)

    def __await__(self) -> Generator[Any, None, C_co]:
        underway = self._underway
        with _OutcomeWait(self):
            underway._check_wait(awaits=True)
            ended: Arrivals[CallFuture] = Arrivals()
            underway._add_callback(lambda _: ended.end_queue())
            yield from ended.async_wait_for_item().__await__()
        try:
            return self.result()
        finally:
            del self, underway  # This avoids a reference cycle, as in `CallFuture.result`.


class _OutcomeWait:
    """A context manager for a wait. Calls not done at the end count as never awaited, so that failures are logged."""

    __slots__ = ("_calls",)

    def __init__(self, *calls: Call[Any]) -> None:
        self._calls = [call for call in calls if call._underway.handle is not None]

    def __enter__(self) -> None:
        for call in self._calls:
            call._underway.handle = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.mark_unasked({call for call in self._calls if kind is not None or not call.done()})

    def mark_unasked(self, unasked: Collection[Call[Any]]) -> None:
        """Mark calls of the block as never awaited, because no user has received the outcome."""
        for call in self._calls:
            if call in unasked:
                call._underway._attach_handle(call)


def make_finished_call(label: str, value: Any = None, error: BaseException | None = None) -> Call[Any]:
    """Return a finished call with a value or an error."""
    underway = CallFuture(label)
    if error is None:
        underway._set_result(value)
        return Call(underway)
    underway._set_error(error)
    call: Call[Any] = Call(underway)
    underway.handle = weakref.ref(call, partial(_log_unasked, label, error))
    return call


def _log_unasked(label: str, error: BaseException, _: object) -> None:
    _log.error("%s has failed, and its result was never asked for: %s", label, get_message(error))


def wait(calls: Iterable[Call[C]], timeout: float | None = None) -> tuple[set[Call[C]], set[Call[C]]]:
    """Wait until all calls are done, or the time is up.

    Args:
        calls: The calls.
        timeout: Seconds to wait at most; None and `math.inf` wait for ever.

    Returns:
        The calls that are done, and those that aren't.
    """
    timeout = parse_limit(timeout, "wait(timeout)")
    everything = _only_calls(calls, "wait()")
    deadline = Deadline(timeout)
    with _OutcomeWait(*everything):
        for call in everything:
            try:
                call._underway._wait(deadline.seconds_left)
            except TimeoutError:
                break
    return {c for c in everything if c.done()}, {c for c in everything if not c.done()}


def as_completed(calls: Iterable[Call[C]], timeout: float | None = None) -> Iterator[Call[C]]:
    """Yield calls in order of completion.

    Args:
        calls: The calls; each is given once.
        timeout: Seconds to wait at most, for all calls together.

    Raises:
        TimeoutError: Some calls aren't done in time; they continue.
    """
    return _CompletedCalls(_only_calls(calls, "as_completed()"), parse_limit(timeout, "as_completed(timeout)"))


def _only_calls(calls: Iterable[Call[C]], what: str) -> list[Call[C]]:
    everything = list(calls)
    for call in everything:
        if not isinstance(call, Call):
            raise TypeError(f"{what} takes calls, as submit() gives them, not {call!r}; a resident has a wait() itself")
    return everything


class _CompletedCalls(Iterator[Call[C]]):
    """The iterator of `as_completed`. Unlike a generator, it can be used again after an interruption."""

    def __init__(self, calls: Iterable[Call[C]], timeout: float | None) -> None:
        self._pending = set(calls)
        self._arrivals: Arrivals[Call[C]] = Arrivals()
        self._timeout, self._deadline = timeout, Deadline(timeout)
        self._wait = _OutcomeWait(*self._pending)
        self._wait.__enter__()
        for call in self._pending:
            call._underway._check_wait()
            call._underway._add_callback(partial(_on_arrived, self._arrivals, call))

    def __next__(self) -> Call[C]:
        mine: deque[Call[C]] = deque()
        try:
            while not self._arrivals.take_item(mine):
                if not self._pending:
                    raise StopIteration
                if self._deadline.is_over:
                    count = len(self._pending)
                    raise TimeoutError(f"{count} calls aren't done after {self._timeout} s; the calls continue")
                self._arrivals.wait_for_item(self._deadline.limit_wait(SLICE_S))
            self._pending.discard(mine[0])
            return mine[0]
        except BaseException:
            self._arrivals.items.extendleft(mine)  # The calls go back to the front of the queue.
            raise

    def __del__(self) -> None:
        self._wait.mark_unasked(self._pending)


def _on_arrived(arrivals: Arrivals[Call[C]], call: Call[C], underway: CallFuture) -> None:
    arrivals.put_item(call)


@attrs.frozen
class ResidentSpec:
    """A description of a resident without the contents.

    Attributes:
        structure: The value of the first rank whose result counts, with shapes and dtypes in place of tensors.
        bytes_per_rank: Bytes of tensors and arrays on each rank.
        rows_per_rank: Number of rows of the call on each rank; None if nothing was scattered.
    """

    structure: Any
    bytes_per_rank: tuple[int, ...]
    rows_per_rank: tuple[int | None, ...]


class Resident(DriverObject, abc.ABC, Generic[T_co]):
    """A result kept on workers. Pass `.ref` (or the resident) as an argument. The end of a `with` block frees it."""

    _instead = INSTEAD_OF_RESIDENT
    _unsent = "; pass it (or its .ref) as a call's argument"

    @property
    @abc.abstractmethod
    def ref(self) -> T_co:
        """A placeholder for the value, to be passed as an argument to any role's method."""

    @property
    @abc.abstractmethod
    def spec(self) -> ResidentSpec:
        """The structure, shapes, dtypes and bytes of the value. Reading this waits for the value."""

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Wait until the value is in the workers.

        Args:
            timeout: Seconds to wait at most; None for the runtime's `call_timeout`.

        Raises:
            TimeoutError: The value isn't there yet; the resident stays.
            RoleError: The call that makes the value has failed; other errors of calls are raised, too.
        """

    @abc.abstractmethod
    def fetch(self, timeout: float | None = None) -> T_co:
        """Return the collected value to the driver.

        Args:
            timeout: Seconds to wait at most; None for the runtime's `call_timeout`.

        Raises:
            TimeoutError: The value isn't there yet; the resident stays.
        """

    @abc.abstractmethod
    def free(self) -> None:
        """Free the value on the workers. A second call does nothing; later uses raise ClosedError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()
