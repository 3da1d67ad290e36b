"""All errors that colocate raises. Each one says what happened, where, and what to do.

All derive from `ColocateError` and from the nearest builtin, carry their facts as attributes, and survive pickling
with attributes, cause and notes.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import attrs


class ColocateError(Exception):
    """Base class of all errors of colocate.

    Unknown attributes are None (never a guess). Each call that ends with a common failure raises an exception of its
    own, because a traceback belongs to one thread; these exceptions are equal.
    """

    _is_consequence = False  # True if the error is only a consequence of another rank's failure.
    _is_reported = False  # True once a user has received the error. Several calls may end with the same error.

    group: str | None = None
    role: str | None = None
    method: str | None = None
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    exitcode: int | None = None
    signal: str | None = None
    log_tail: str | None = None
    remote_traceback: str | None = None
    called_at: str | None = None
    row: int | None = None

    _first: ColocateError | None = None  # In a copy, this is the original error.

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        for name, value in facts.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)

    @property
    def message(self) -> str:
        """The error's text, without the parts that subclasses add."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__  # Read the cause before `__dict__`, because unpickling a lazy cause changes `__dict__`.
        if cause is not None and not isinstance(cause, ColocateError):
            cause = _make_picklable(cause)
        state = {name: value for name, value in self.__dict__.items() if name != "_first"}
        return _restore, (type(self), self.args, state, cause)

    def __copy__(self) -> ColocateError:
        cause = self.__cause__  # Read the cause before `__dict__`, because unpickling a lazy cause changes `__dict__`.
        return _restore(type(self), self.args, {**self.__dict__, "_first": self._first or self}, cause)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ColocateError) and (self._first or self) is (other._first or other)

    def __hash__(self) -> int:
        return id(self._first or self)


def _make_picklable(cause: BaseException) -> BaseException:
    """Return a picklable form of a cause: the exception itself, or a RuntimeError with the same text."""
    with contextlib.suppress(Exception, SystemExit):  # A user's exception class may fail to unpickle.
        if type(pickle.loads(pickle.dumps(cause))) is type(cause):
            return cause
    words = "".join(traceback.format_exception_only(cause)).strip()
    return RuntimeError(f"{words} (the exception itself can't be pickled)")


def _restore(
    cls: type[ColocateError], args: tuple[Any, ...], state: dict[str, Any], cause: BaseException | None
) -> ColocateError:
    error = cls(*args)
    error.__dict__.update(state)
    if cause is not None:
        error.__cause__ = cause
    return error


_CAUSE: Any = vars(BaseException)["__cause__"]


class RoleError(ColocateError, RuntimeError):
    """A role's method or constructor raised; `__cause__` is the original exception.

    The first access unpickles the cause, whose class is the user's and may be slow to import. `called_at` is the
    driver's line that made the call.
    """

    _unpickle: Callable[[], BaseException] | None = None

    @property
    def __cause__(self) -> BaseException | None:
        if (unpickle := self._unpickle) is not None:
            cause = unpickle()
            if self.__dict__.pop("_unpickle", None) is not None:  # Another thread may have set the cause meanwhile.
                _CAUSE.__set__(self, cause)
        original: BaseException | None = _CAUSE.__get__(self)
        return original

    @__cause__.setter
    def __cause__(self, cause: BaseException | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__.pop("_unpickle", None)
        _CAUSE.__set__(self, cause)

    def __str__(self) -> str:
        return self.message + _call_line(self) + _worker_traceback(self)


class RenewalError(RoleError):
    """A group could not continue after a failed call.

    A role's `renew` raised, a role still holds a process group that had to be cut, or the ranks of one model had
    made different numbers of updates. A group with `on_failure="restart"` restarts from its checkpoint.
    """


class RoleStartError(ColocateError, RuntimeError):
    """Roles could not be constructed; `errors` maps each failed rank to its `RoleError`."""

    errors: Mapping[int, ColocateError] = {}

    def __str__(self) -> str:
        return self.message + _worker_traceback(self)


class WorkerDied(ColocateError, RuntimeError):
    """A worker process ended by itself. `detail` is the cluster's text, and `running` the worker's last work."""

    detail: str | None = None
    running: str | None = None

    def __str__(self) -> str:
        text = self.message
        if self.log_tail:
            text += f"\n\nIts last lines:\n{self.log_tail.rstrip()}"
        return text


class ChildDied(ColocateError, RuntimeError):
    """A process started by a role (`ctx.start`) ended by itself, or was ended because of a hang or a late start.

    Attributes:
        name: The child's name.
    """

    name: str | None = None

    def __str__(self) -> str:
        text = self.message + _call_line(self)
        if self.log_tail:
            text += f"\n\nIts last lines:\n{self.log_tail.rstrip()}"
        return text


class GroupRestarted(WorkerDied):
    """The group was restarted. Calls that were pending belonged to the previous generation, and fail."""


class CallTimeout(ColocateError, TimeoutError):
    """A call exceeded its timeout; `stacks` maps each late rank to its Python stack."""

    stacks: Mapping[int, str] = {}

    def __str__(self) -> str:
        parts = [self.message + _call_line(self)]
        parts += [f"rank {rank} is here:\n{stack.rstrip()}" for rank, stack in sorted(self.stacks.items())]
        return "\n\n".join(parts)


class CallCancelled(ColocateError, CancelledError, RuntimeError):
    """The call was cancelled before any rank had begun."""


class PlacementError(ColocateError, RuntimeError):
    """The requested slots can never fit. `nodes` has a row for each node: node, wanted, total, free."""

    nodes: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        return "\n".join([self.message, *_table(self.nodes)])


class ClusterError(ColocateError, ConnectionError):
    """The cluster is unreachable, refuses this driver, or has been lost.

    Attributes:
        logs: The last log lines of the cluster's own processes, by file, if the cluster could not be started, or the
            driver's process in the cluster has ended by itself. A run saves these in its folder, as engine-NAME.
    """

    logs: Mapping[str, str] | None = None


class PlacementTimeout(PlacementError, TimeoutError):
    """The requested slots could fit, but didn't become free in time."""


class PluginError(ColocateError, ImportError):
    """A plugin is missing, broken, or claims a taken name."""

    name: str | None = None
    distribution: str | None = None
    hint: str | None = None


@attrs.frozen
class Mistake:
    """One mistake in a config: the place, a message, and the most similar valid key."""

    path: str
    line: int | None
    message: str
    nearest: str | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f"line {self.line}"
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest else ""
        return ": ".join(filter(None, (line, self.path, f"{self.message}{hint}")))


class ConfigError(ColocateError, ValueError):
    """A config or a declaration is wrong; `mistakes` has all mistakes at once."""

    mistakes: Sequence[Mistake] = ()

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  {mistake}" for mistake in self.mistakes)])


class DispatchError(ColocateError, ValueError):
    """Arguments can't be dispatched to the ranks as declared, or results can't be collected as declared."""

    parameter: str | None = None


class CapabilityError(ColocateError, NotImplementedError):
    """An executor lacks a requested capability; `executors` names the executors with this capability."""

    capability: str | None = None
    executors: Sequence[str] = ()


class SerializationError(ColocateError, TypeError):
    """A value can't be sent. `argument` names the value, and `path` the part inside that is at fault."""

    argument: str | None = None
    path: str | None = None


class BorrowedError(ColocateError, RuntimeError):
    """A close is refused, because `borrowers` still use the object. `close(force=True)` breaks the borrows."""

    borrowers: Sequence[str] = ()


class ClosedError(ColocateError, RuntimeError):
    """A closed object was used; `closed_by` names the closer and the place of the close."""

    closed_by: str | None = None


class ForkedError(ColocateError, RuntimeError):
    """A live object, such as a group, was used in a forked child process, which owns nothing."""


class MemoryBudgetError(ColocateError, MemoryError):
    """Memory doesn't suffice: there is no room for a request, or roles exceed a budget.

    The text says which role holds how much. A sleep or a wake that fails with this error has changed nothing.
    """

    def __str__(self) -> str:
        return self.message + _call_line(self)


class SleepingError(ColocateError, RuntimeError):
    """The call needs memory of a sleeping role. `group.wake` restores the memory."""


class StaleWeightsError(ColocateError, RuntimeError):
    """A role's weights differ from the source's weights, entirely or in part. `sync_weights` copies the weights."""


class WeightsDifferError(ColocateError, RuntimeError):
    """After a sync, `sync_weights(check=True)` has found that a role's weights differ from the source's weights.

    Attributes:
        names: The weights that differ, all of them, by the target's names.
    """

    names: tuple[str, ...] = ()


class ReplayError(ColocateError, RuntimeError):
    """A replayed role can't answer a call, because the recording differs; the text names the first difference."""


class PipelineError(ColocateError, RuntimeError):
    """A call inside `group.pipeline()` needs an answer before the pipeline is sent."""


def _call_line(error: ColocateError) -> str:
    return f"\nThe call was made at {error.called_at}" if error.called_at else ""


def _worker_traceback(error: ColocateError) -> str:
    trace = error.remote_traceback or ""
    return f"\n\nTraceback in the worker:\n{trace.rstrip()}" if "\n  File " in trace else ""


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(rows[0])
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
