"""The interface of a stream of rows, with checks of options and of yielded rows."""

from __future__ import annotations

import abc
import sys
from collections.abc import AsyncIterator, Iterator
from inspect import isawaitable
from types import TracebackType
from typing import Any, Generic, Literal, NoReturn, Self, TypeAlias, TypeVar

from colocate._role.call import DriverObject
from colocate._role.context import RowState
from colocate._role.method_spec import MethodSpec
from colocate._system.jobs import format_error
from colocate._system.numbers import find_amount_problem, format_count
from colocate._system.tracebacks import format_exception
from colocate._values.leaving import copy_value
from colocate.errors import ConfigError, DispatchError, SerializationError

T_co = TypeVar("T_co", covariant=True)

OnError: TypeAlias = Literal["raise", "return"]
"""The effect of a row's error: "raise" ends the call, and "return" returns the error in place of the row's value."""


class RowStream(DriverObject, abc.ABC, Generic[T_co]):
    """The rows of a call in the order of their ends, as `(index, value)` with the index in the call's argument.

    The stream is an iterator, an async iterator, and a context manager that closes the stream. Several threads or tasks
    may read. Each row goes to one reader, and all waiting readers get the end. A stream without references is closed.
    """

    _instead = "Give the values that were read from it instead"
    _unsent = "; send the values that were read from it"

    def __iter__(self) -> Iterator[tuple[int, T_co]]:
        return self

    @abc.abstractmethod
    def __next__(self) -> tuple[int, T_co]:
        """Wait until a row has ended, and return the row's index and value.

        Raises:
            StopIteration: All rows have been read, and the call has ended.
            ColocateError: The error of a row, or of the call; ClosedError if the stream is closed.
        """

    def __aiter__(self) -> AsyncIterator[tuple[int, T_co]]:
        return self

    @abc.abstractmethod
    async def __anext__(self) -> tuple[int, T_co]:
        """Wait until a row has ended, as `__next__` does, without blocking the event loop."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop reading, without waiting. Rows that haven't begun never will, and running rows are cancelled."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_row_options(spec: MethodSpec, label: str, on_error: object, retry: object, sticky: object) -> None:
    """Check that options fit a method. None means that an option is unchanged."""
    if on_error not in (None, "raise", "return"):
        raise ConfigError(f"options(on_error={on_error!r}): use 'raise' or 'return'")
    if retry is not None and (problem := find_amount_problem(retry, whole=True)) is not None:
        raise ConfigError(f"options(retry) {problem}")
    if sticky is not None and not callable(sticky):
        raise ConfigError(f"options(sticky={sticky!r}): give a function of a row, which makes its key")
    if spec.rows is None and (retry or sticky is not None):
        raise ConfigError(
            f"{label} gets the rows of a rank at once, by {spec.dispatch!r}: retry= and sticky= are for methods that "
            "take one row (@method(rows=...))"
        )


def refuse_keep(label: str) -> NoReturn:
    """Raise an error, because a method with rows that end one by one can't leave results in the workers."""
    raise DispatchError(
        f"{label}.keep(...): the driver gives out its rows one by one, and none stay in the workers: call it, submit "
        "it, or read its .stream(...)"
    )


class YieldedItems:
    """A check that a method yields each row of a rank exactly once."""

    def __init__(self, label: str, rows: int) -> None:
        """Prepare the check of one rank's rows.

        Args:
            label: The method's name, for error texts.
            rows: The number of the rank's rows.
        """
        self._label = label
        self._rows = rows
        self._taken_rows: set[int] = set()

    @property
    def remaining(self) -> int:
        """The number of rows that haven't been yielded yet."""
        return self._rows - len(self._taken_rows)

    def take_item(self, item: Any) -> tuple[int, Any]:
        """Check a yielded item, and return the row's index and value.

        Raises:
            DispatchError: The item is no pair of index and value, or the row was yielded before.
        """
        if not (isinstance(item, tuple) and len(item) == 2 and hasattr(item[0], "__index__")):
            raise DispatchError(f"{self._prefix} {_shorten_item(item)}")
        index, value = item[0].__index__(), item[1]
        if not 0 <= index < self._rows:
            raise DispatchError(f"{self._prefix} the index {index}")
        if index in self._taken_rows:
            raise DispatchError(f"{self._prefix} row {index} twice")
        self._taken_rows.add(index)
        return index, value

    def take_copy(self, item: Any) -> tuple[int, Any]:
        """Check a yielded item, and return the row's index with a copy of the value.

        The method continues after the yield, and may write to the same buffer.

        Raises:
            SerializationError: The value can't be copied.
        """
        index, value = self.take_item(item)
        return index, copy_row_value(value, f"{self._label}, row {index}")

    def check_end(self) -> None:
        """Raise a `DispatchError` if the method hasn't yielded all rows."""
        if self.remaining:
            missing = [index for index in range(self._rows) if index not in self._taken_rows]
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise DispatchError(f"{self._prefix} nothing for {shown}")

    @property
    def _prefix(self) -> str:
        got = format_count(self._rows, "row")
        return f"{self._label} yields (index, value) once for each of the {got} that it has got, and has yielded"


def copy_row_value(value: Any, what: str) -> Any:
    """Return a copy of a row's value, because the call continues and may change the value.

    Raises:
        SerializationError: The value can't be copied.
    """
    try:
        return copy_value(value)
    except Exception as error:  # Users' classes may raise any error.
        raise SerializationError(
            f"{what}: its value can't be copied ({format_error(error)}), as the values of rows are while the call goes "
            "on: make it of plain data, arrays and tensors"
        ) from error


def _shorten_item(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 80 else f"{text[:80]}..."


async def end_row(state: RowState) -> None:
    """Run the cleanup functions of an ended row, the last one first. Errors of these functions are only printed."""
    while state.at_end:
        try:
            ended = state.at_end.pop()()
            if isawaitable(ended):
                await ended
        except Exception as error:
            print(
                f"what row {state.row} has begun could not be ended:\n{format_exception(error)}",
                file=sys.stderr,
                flush=True,
            )
