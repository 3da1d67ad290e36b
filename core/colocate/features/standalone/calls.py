"""A role object made outside any worker answers as a view of one rank, so algorithm code runs without an executor."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import attrs

from colocate._role.awaited import awaited
from colocate._role.call import Call, Resident, ResidentSpec, T_co, ended
from colocate._role.context import (
    CallState,
    Context,
    RowState,
    attach,
    reset_current,
    running_call,
    set_current,
    standalone_context,
)
from colocate._role.method_spec import MethodSpec
from colocate._role.rows import OnError, RowStream, Yielded, check_row_options, end_row, no_keep, no_such_attribute
from colocate._system.numbers import limit
from colocate._values.batch import each_row
from colocate._values.dispatch import Plan, chosen_ranks, plan
from colocate._values.leaving import describe, ordinary, tensor_bytes
from colocate._values.mesh import Ranks
from colocate.errors import ClosedError, DispatchError

_ONE = Ranks(1)


@attrs.frozen
class StandaloneCall:
    """A role method of a standalone object: dispatch and collect apply, everything runs at once, errors come bare."""

    _instance: Any
    _spec: MethodSpec

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        spec, planned = self._spec, self._planned(args, kwargs)
        with self._running(CallState(0, valid_rows=planned.valid[0])) as ctx:
            ctx.count(ctx._call, spec.name)
            result = spec.call(self._instance, dict(planned.arguments[0]))
            result = awaited(result) if spec.is_async else result
        ranks = attrs.evolve(_ONE, rows=planned.valid, padded=planned.padded)
        return spec.collect.join([ordinary(result)], ranks)

    def _planned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        arguments = {
            name: given.fetch() if isinstance(given, LocalResident) else given
            for name, given in self._spec.bind(args, dict(kwargs)).items()
        }
        return plan(self._spec.dispatch, arguments, _ONE, None)

    @contextlib.contextmanager
    def _running(self, call: CallState) -> Iterator[Context]:
        """A block of role code."""
        ctx: Context | None = getattr(self._instance, "_colocate_ctx", None)
        if ctx is None:
            ctx = standalone_context(type(self._instance).__name__)
            attach(self._instance, ctx)
        token, call_token = set_current(ctx), running_call.set(call)
        try:
            yield ctx
        finally:
            running_call.reset(call_token)
            reset_current(token)

    def __getattr__(self, name: str) -> NoReturn:
        raise no_such_attribute(f"{type(self._instance).__name__}.{self._spec.name}", name)

    def submit(self, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Run it at once; the call is done when it returns."""
        label = f"{type(self._instance).__name__}.{self._spec.name}"
        try:
            return ended(label, self(*args, **kwargs))
        except Exception as error:
            return ended(label, error=error)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Run it at once; the resident holds the collected value itself."""
        return LocalResident(self(*args, **kwargs))

    def options(self, *, timeout: float | None = None, ranks: Sequence[int] | None = None) -> StandaloneCall:
        """Return the same: there is one rank, and nothing to wait for."""
        if ranks is not None and (named := list(chosen_ranks(ranks))) != [0]:
            raise DispatchError(f"ranks={named}: a role object outside any worker has rank 0 only")
        return self


@attrs.frozen
class StandaloneRows(StandaloneCall):
    """A standalone call whose rows end one by one: all of them run when it is called, up to `concurrency` at a time."""

    _on_error: OnError = "raise"
    _retry: int = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return [value for _, value in sorted(self._ended(args, kwargs), key=lambda row: row[0])]

    def stream(self, /, *args: Any, **kwargs: Any) -> RowStream[Any]:
        """Run it; the rows come in the order in which they ended."""
        label = f"{type(self._instance).__name__}.{self._spec.name}"
        return _LocalRows(iter(self._ended(args, kwargs)), label)

    def keep(self, /, *args: Any, **kwargs: Any) -> Resident[Any]:
        """Run it at once, if its rows come as a batch; otherwise refuse it."""
        if self._spec.rows is not None:
            no_keep(f"{type(self._instance).__name__}.{self._spec.name}")
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
        """As that of a view; there is one rank, and nothing to wait for."""
        super().options(timeout=timeout, ranks=ranks)
        check_row_options(self._spec, f"{type(self._instance).__name__}.{self._spec.name}", on_error, retry, sticky)
        return attrs.evolve(self, on_error=on_error or self._on_error, retry=self._retry if retry is None else retry)

    def _ended(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, Any]]:
        spec, planned = self._spec, self._planned(args, kwargs)
        arguments = dict(planned.arguments[0])
        with self._running(CallState(0, valid_rows=planned.valid[0])) as ctx:
            ctx.count(ctx._call, spec.name)
            if spec.rows is None:
                items, yielded = spec.call(self._instance, arguments), Yielded(spec.name, planned.valid[0] or 0)
                taken = awaited(_taken(items, yielded)) if spec.is_async else [yielded.take(item) for item in items]
                yielded.check_end()
                return [(index, ordinary(value)) for index, value in taken]
            ctx.calls_before += 1
            rows = each_row(arguments.pop(spec.rows), spec.rows)
            ended: list[tuple[int, Any]] = awaited(self._played(rows, spec.rows, arguments))
            return ended

    async def _played(self, rows: Sequence[Any], name: str, arguments: dict[str, Any]) -> list[tuple[int, Any]]:
        import asyncio

        waiting, found = deque(enumerate(rows)), []

        async def place() -> None:
            while waiting:
                index, row = waiting.popleft()
                found.append((index, await self._row(index, {name: row, **arguments})))

        await asyncio.gather(*[place() for _ in range(min(self._spec.concurrency, len(rows)))])
        return found

    async def _row(self, index: int, arguments: dict[str, Any]) -> Any:
        call = running_call.get()
        assert call is not None
        for tries in range(self._retry + 1):
            state = RowState(0, row=index, of=call)
            token = running_call.set(state)
            try:
                return ordinary(await self._spec.call(self._instance, arguments))
            except Exception as error:
                if tries == self._retry:
                    if self._on_error == "raise":
                        raise
                    return error
            finally:
                await end_row(state)
                running_call.reset(token)
        raise AssertionError


async def _taken(items: AsyncIterator[Any], yielded: Yielded) -> list[tuple[int, Any]]:
    return [yielded.take(item) async for item in items]


class _LocalRows(RowStream[Any]):
    """Rows that have ended."""

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
        """Read no more."""
        self._is_closed = not self._is_over


class LocalResident(Resident[T_co]):
    """The resident of a role object outside any worker: it is the value."""

    def __init__(self, value: T_co) -> None:
        self._value: T_co | None = value
        self._freed = False

    @property
    def ref(self) -> T_co:
        """The value itself."""
        return self.fetch()

    @property
    def spec(self) -> ResidentSpec:
        """Return the structure, shapes, dtypes and bytes of the value."""
        return ResidentSpec(describe(self._value), (tensor_bytes(self._value),), (None,))

    def wait(self, timeout: float | None = None) -> None:
        """Return at once: the value is there."""
        limit(timeout, "wait(timeout)")
        self.fetch()

    def fetch(self, timeout: float | None = None) -> T_co:
        """The value itself."""
        limit(timeout, "fetch(timeout)")
        if self._freed:
            raise ClosedError("this resident was freed")
        return cast("T_co", self._value)

    def free(self) -> None:
        """Let go of it."""
        self._value, self._freed = None, True
