"""Every error that colocate raises: what happened, where, and what to do.

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
    """The root of all errors of colocate.

    Attributes that the cause doesn't know are None (never a guess). A failure that several calls end with is raised by
    each as an exception of its own, for a traceback belongs to one thread; these are equal.
    """

    _follows = False  # whether it only says what has kept a rank from going on, of which another rank's is the cause
    _told = False  # whether somebody has been given it; it may be the error of several calls

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

    _first: ColocateError | None = None  # that this is a copy of

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        for name, value in facts.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)

    @property
    def message(self) -> str:
        """The text without anything a subclass adds to it."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__  # first: it may be made now
        if cause is not None and not isinstance(cause, ColocateError):
            cause = _carried(cause)
        state = {name: value for name, value in self.__dict__.items() if name != "_first"}
        return _restore, (type(self), self.args, state, cause)

    def __copy__(self) -> ColocateError:
        cause = self.__cause__  # likewise
        return _restore(type(self), self.args, {**self.__dict__, "_first": self._first or self}, cause)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ColocateError) and (self._first or self) is (other._first or other)

    def __hash__(self) -> int:
        return id(self._first or self)


def _carried(cause: BaseException) -> BaseException:
    """A cause that survives pickling: itself, or its words."""
    with contextlib.suppress(Exception, SystemExit):  # its class says how, and may want other arguments
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

    It is unpickled by whoever looks at it first: its class is the user's, and may take its time.
    `called_at` is the driver's line that made the call.
    """

    _unpickle: Callable[[], BaseException] | None = None

    @property
    def __cause__(self) -> BaseException | None:
        if (unpickle := self._unpickle) is not None:
            cause = unpickle()
            if self.__dict__.pop("_unpickle", None) is not None:  # no other thread has been faster
                _CAUSE.__set__(self, cause)
        found: BaseException | None = _CAUSE.__get__(self)
        return found

    @__cause__.setter
    def __cause__(self, cause: BaseException | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__.pop("_unpickle", None)
        _CAUSE.__set__(self, cause)

    def __str__(self) -> str:
        return self.message + _called(self) + _in_the_worker(self)


class RenewalError(RoleError):
    """After a failed call a group could not go on as it was.

    A role's `renew` raised, a role still holds a process group that had to be cut, or the ranks of one model had gone
    different numbers of updates. A group of `on_failure="restart"` goes on from its checkpoint.
    """


class RoleStartError(ColocateError, RuntimeError):
    """Roles could not be constructed; `errors` maps each failed rank to its `RoleError`."""

    errors: Mapping[int, ColocateError] = {}

    def __str__(self) -> str:
        return self.message + _in_the_worker(self)


class WorkerDied(ColocateError, RuntimeError):
    """A worker process ended by itself; `detail` holds the cluster's own words, `running` what it was doing."""

    detail: str | None = None
    running: str | None = None

    def __str__(self) -> str:
        text = self.message
        if self.log_tail:
            text += f"\n\nIts last lines:\n{self.log_tail.rstrip()}"
        return text


class ChildDied(ColocateError, RuntimeError):
    """A process that a role had started (`ctx.start`) has ended by itself, or was ended as it hung or never got ready.

    Attributes:
        name: What the child is called.
    """

    name: str | None = None

    def __str__(self) -> str:
        text = self.message + _called(self)
        if self.log_tail:
            text += f"\n\nIts last lines:\n{self.log_tail.rstrip()}"
        return text


class GroupRestarted(WorkerDied):
    """The group was rebuilt; what was pending belonged to its previous generation."""


class CallTimeout(ColocateError, TimeoutError):
    """A call outlived its timeout; `stacks` maps each late rank to its Python stack."""

    stacks: Mapping[int, str] = {}

    def __str__(self) -> str:
        parts = [self.message + _called(self)]
        parts += [f"rank {rank} is here:\n{stack.rstrip()}" for rank, stack in sorted(self.stacks.items())]
        return "\n\n".join(parts)


class CallCancelled(ColocateError, CancelledError, RuntimeError):
    """The call was cancelled before any rank had begun it."""


class PlacementError(ColocateError, RuntimeError):
    """No placement can ever fit; `nodes` has a row per node: node, wanted, total, free."""

    nodes: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        return "\n".join([self.message, *_table(self.nodes)])


class ClusterError(ColocateError, ConnectionError):
    """The cluster can't be reached, doesn't let this driver in, or has been lost.

    Attributes:
        logs: What the cluster's own processes have logged last, by file, where it could not be started, or the
            process that was in it has ended by itself. A run leaves them in its folder, as engine-NAME.
    """

    logs: Mapping[str, str] | None = None


class PlacementTimeout(PlacementError, TimeoutError):
    """A placement that could fit didn't become free in time."""


class PluginError(ColocateError, ImportError):
    """A plugin is missing, broken, or claims a taken name."""

    name: str | None = None
    distribution: str | None = None
    hint: str | None = None


@attrs.frozen
class Mistake:
    """One mistake in a config: where, what, and the nearest valid key."""

    path: str
    line: int | None
    message: str
    nearest: str | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f"line {self.line}"
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest else ""
        return ": ".join(filter(None, (line, self.path, f"{self.message}{hint}")))


class ConfigError(ColocateError, ValueError):
    """A config or a declaration is wrong; `mistakes` has all of them at once."""

    mistakes: Sequence[Mistake] = ()

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  {mistake}" for mistake in self.mistakes)])


class DispatchError(ColocateError, ValueError):
    """Arguments don't fit how they should reach the ranks, or results how they should be joined."""

    parameter: str | None = None


class CapabilityError(ColocateError, NotImplementedError):
    """An executor lacks what was asked; `executors` names those that have it."""

    capability: str | None = None
    executors: Sequence[str] = ()


class SerializationError(ColocateError, TypeError):
    """Something can't be sent: `argument` names it, `path` says where inside it the fault is."""

    argument: str | None = None
    path: str | None = None


class BorrowedError(ColocateError, RuntimeError):
    """Something can't be closed: `borrowers` still use it. `close(force=True)` breaks the borrows."""

    borrowers: Sequence[str] = ()


class ClosedError(ColocateError, RuntimeError):
    """Something is used that is closed; `closed_by` says what closed it and where."""

    closed_by: str | None = None


class ForkedError(ColocateError, RuntimeError):
    """A live object was used in a forked child, which owns nothing."""


class MemoryBudgetError(ColocateError, MemoryError):
    """Memory doesn't suffice: there is no room for what was asked for, or roles hold more than they may (a budget).

    It says who has how much. A sleep or a wake that fails so has changed nothing.
    """

    def __str__(self) -> str:
        return self.message + _called(self)


class SleepingError(ColocateError, RuntimeError):
    """What was asked for is memory of a role that sleeps: `group.wake` brings it back."""


class StaleWeightsError(ColocateError, RuntimeError):
    """A role's weights aren't those of its source any more, or only some of them: `sync_weights` brings them."""


class WeightsDifferError(ColocateError, RuntimeError):
    """After a sync a role's weights aren't what was to arrive, as `sync_weights(check=True)` has found.

    Attributes:
        names: The weights that differ, all of them, by the target's names.
    """

    names: tuple[str, ...] = ()


class ReplayError(ColocateError, RuntimeError):
    """A role that is replayed can't answer a call as it was recorded; says where the call differs, and how."""


class PipelineError(ColocateError, RuntimeError):
    """A call inside `group.pipeline()` that needs an answer before the pipeline has been sent."""


def _called(error: ColocateError) -> str:
    return f"\nThe call was made at {error.called_at}" if error.called_at else ""


def _in_the_worker(error: ColocateError) -> str:
    trace = error.remote_traceback or ""
    return f"\n\nTraceback in the worker:\n{trace.rstrip()}" if "\n  File " in trace else ""


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as aligned text columns, with a header."""
    if not rows:
        return []
    columns = list(rows[0])
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
