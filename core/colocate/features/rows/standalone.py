"""Calls with rows on a role object that isn't in a worker. All rows run during the call."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from colocate._role.awaited import run_coroutine
from colocate._role.call import Resident
from colocate._role.context import CallState, RowState, running_call
from colocate._values.batch import split_rows
from colocate._values.leaving import detach_value
from colocate.errors import ClosedError
from colocate.features.rows.row_stream import (
    OnError,
    RowStream,
    YieldedItems,
    check_row_options,
    copy_row_value,
    end_row,
    refuse_keep,
)
from colocate.features.standalone.calls import StandaloneCall


@attrs.frozen
class StandaloneRows(StandaloneCall):
    """A call with rows on a role object outside any worker.

    All rows run during the call, up to `concurrency` at the same time.
    """

    _on_error: OnError = "raise"
    _retry: int = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run all rows, and return the values in order."""
        return [value for _, value in sorted(self._run_rows(args, kwargs), key=lambda row: row[0])]

    def stream(self, /, *args: Any, **kwargs: Any) -> RowStream[Any]:
        """Run all rows, and return a stream of the rows in the order of their ends."""
        label = f"{type(self._instance).__name__}.{self._spec.name}"
        return _LocalRows(iter(self._run_rows(args, kwargs)), label)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Run a batched method and keep the result. Raises an error for methods with `rows=`."""
        if self._spec.rows is not None:
            refuse_keep(f"{type(self._instance).__name__}.{self._spec.name}")
        return super().keep(*args, **kwargs)

    def options(
        self,
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        on_error: OnError | None = None,
        retry: int | None = None,
        sticky: Callable[[Any], object] | None = None,
    ) -> StandaloneRows:
        """Return the method with changed options, as a view does. Only `on_error` and `retry` have an effect."""
        super().options(timeout=timeout, ranks=ranks)
        check_row_options(self._spec, f"{type(self._instance).__name__}.{self._spec.name}", on_error, retry, sticky)
        return attrs.evolve(self, on_error=on_error or self._on_error, retry=self._retry if retry is None else retry)

    def _run_rows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        spec, planned = self._spec, self._plan_call(args, kwargs)
        arguments = dict(planned.arguments[0])
        with self._enter_role(CallState(0, valid_rows=planned.valid[0])) as ctx:
            ctx.number_call(ctx._call, spec.name)
            if spec.rows is None:
                items, yielded = spec.call(self._instance, arguments), YieldedItems(spec.name, planned.valid[0] or 0)
                results = (
                    run_coroutine(_take_items(items, yielded)) if spec.is_async else [*map(yielded.take_copy, items)]
                )
                yielded.check_end()
                return [(index, detach_value(value)) for index, value in results]
            rows = split_rows(arguments.pop(spec.rows), spec.rows)
            ended: list[tuple[int, Any]] = run_coroutine(self._run_given(rows, spec.rows, arguments))
            return ended

    async def _run_given(self, rows: Sequence[Any], name: str, arguments: dict[str, Any]) -> list[tuple[int, Any]]:
        import asyncio

        waiting, results = deque(enumerate(rows)), []

        async def place() -> None:
            while waiting:
                index, row = waiting.popleft()
                results.append((index, await self._run_row(index, {name: row, **arguments})))

        await asyncio.gather(*[place() for _ in range(min(self._spec.concurrency, len(rows)))])
        return results

    async def _run_row(self, index: int, arguments: dict[str, Any]) -> Any:
        call = running_call.get()
        assert call is not None
        for tries in range(self._retry + 1):
            state = RowState(0, row=index, call=call)
            state.place = call.place
            token = running_call.set(state)
            try:
                return copy_row_value(
                    detach_value(await self._spec.call(self._instance, arguments)), f"{self._spec.name}, row {index}"
                )
            except Exception as error:
                if tries == self._retry:
                    if self._on_error == "raise":
                        raise
                    return error
            finally:
                await end_row(state)
                running_call.reset(token)
        raise AssertionError


async def _take_items(items: AsyncIterator[Any], yielded: YieldedItems) -> list[tuple[int, Any]]:
    return [yielded.take_copy(item) async for item in items]


class _LocalRows(RowStream[Any]):
    """A stream of rows that have all ended."""

    def __init__(self, rows: Iterator[tuple[int, Any]], label: str) -> None:
        self._rows = rows
        self._label = label
        self._is_over = self._is_closed = False

    def __next__(self) -> tuple[int, Any]:
        if self._is_closed:
            raise ClosedError(f"the stream of {self._label} was closed, and is read")
        for row in self._rows:
            return row
        self._is_over = True
        raise StopIteration

    async def __anext__(self) -> tuple[int, Any]:
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def close(self) -> None:
        self._is_closed = not self._is_over
