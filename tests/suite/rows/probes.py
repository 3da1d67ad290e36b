"""Roles whose rows end one by one."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar

from colocate import First, Role, RoleError, Scatter, method
from colocate._role.context import RowState, running_call
from colocate.testing.gate import Address, is_open, pass_gate, pass_gate_async

PLACES, MANY = 2, 40


def _raise_refusal() -> object:
    raise ValueError("not here")


async def _raise_failure() -> None:
    raise KeyError("no such tool")


async def _pass_gate_always(gate: Address) -> None:
    while not is_open(gate):
        with contextlib.suppress(asyncio.CancelledError):
            await pass_gate_async(gate)


def _is_row_to_begin(task: asyncio.Task[Any]) -> bool:
    coroutine: Any = task.get_coro()
    return "RowTasks" in coroutine.__qualname__ and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED


class Unreadable:
    """Can be sent, and not rebuilt."""

    def __reduce__(self) -> Any:
        return _raise_refusal, ()


class RingingRow:
    """Raises a signal while it is rebuilt on the main thread, where that is asked for: `rings` has its number."""

    rings: ClassVar[list[signal.Signals]] = []

    def __init__(self, row: int) -> None:
        self.row = row

    def __getstate__(self) -> int:
        return self.row

    def __setstate__(self, row: int) -> None:
        if self.rings and threading.current_thread() is threading.main_thread():
            signal.raise_signal(self.rings.pop())
        self.row = row


class Playing(Role):
    """Rows that the driver gives one by one."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    @method(rows="row", concurrency=PLACES)
    async def play(self, row: int, factor: int = 1) -> tuple[int, int]:
        """The row, and where it ran."""
        self.log.append(row)
        await asyncio.sleep(0)
        assert self.ctx.row is not None
        return row * factor, self.ctx.rank

    @method(rows="row", concurrency=PLACES)
    async def wait(self, row: Any, gate: Address) -> tuple[int, int]:
        """As `play`; one that isn't None waits at a gate."""
        self.log.append(("begun", self.ctx.row))
        try:
            if row is not None:
                await pass_gate_async(gate)
        except asyncio.CancelledError:
            self.log.append(("cancelled" if self.ctx.cancelled else "not told", self.ctx.row))
            raise
        assert self.ctx.row is not None
        return self.ctx.row, self.ctx.rank

    @method(rows="row", concurrency=PLACES)
    async def fail(self, row: str, gate: Address | None = None) -> tuple[str, int]:
        """Fails in rows of this name; the others wait at a gate, if there is one."""
        self.log.append(row)
        if row == "fail":
            raise KeyError(row)
        if row == "once" and self.ctx.rank == 0:
            raise RuntimeError(row)
        if gate is not None:
            await pass_gate_async(gate)
        return row, self.ctx.rank

    @method(rows="row", concurrency=PLACES)
    async def cancel(self, row: str) -> str:
        """Has tasks cancelled, as libraries do and roles: rows say how."""
        task = asyncio.current_task()
        assert task is not None
        match row:
            case "task group":  # Python before 3.13 leaves its count of cancellations at one
                async with asyncio.TaskGroup() as tools:
                    tools.create_task(_raise_failure())
            case "swallowed":
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
                raise KeyError(row)
            case "itself":
                task.cancel()
                await asyncio.sleep(0)
            case "next":
                while not (tasks := [*filter(_is_row_to_begin, asyncio.all_tasks())]):
                    await asyncio.sleep(0)
                for row_task in tasks:
                    row_task.cancel()
        return row

    @method(rows="row", concurrency=8)
    async def flaky(self, row: int) -> int:
        """Fails in each third row; what the event loop has to say goes to the log."""
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.log.append(str(context)))
        if row % 3 == 0:
            raise ValueError(row)
        await asyncio.sleep(0)
        return row

    @method(rows="row", concurrency=PLACES)
    async def ring(self, row: int) -> RingingRow:
        """Return what may raise a signal on the driver."""
        return RingingRow(row)

    @method(rows="row", concurrency=PLACES)
    async def swallow(self, row: str, gate: Address) -> str:
        """Waits at a gate, whatever is cancelled; one row fails instead, when the other has come there."""
        if row == "fail":
            while ("waits", 0) not in self.log:
                await asyncio.sleep(0)
            raise KeyError(row)
        self.log.append(("waits", self.ctx.row))
        await _pass_gate_always(gate)
        return row

    @method(rows="row", concurrency=MANY)
    async def block(self, row: int, gate: Address) -> int:
        """Waits at a gate, on another thread."""
        await asyncio.to_thread(pass_gate, gate)
        return row

    @method(rows="row", concurrency=PLACES)
    async def give(self, row: int) -> object:
        """The row, or what can't be rebuilt."""
        return Unreadable() if row % 2 else row

    @method(rows="row", concurrency=PLACES)
    async def die(self, row: Path | None) -> tuple[int, int]:
        """Kills its worker in rows with the name of a file that isn't there, which is there afterwards."""
        if row is not None and not row.exists():
            row.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.ctx.generation, self.ctx.rank

    @method(rows="row", concurrency=PLACES)
    async def draw(self, row: int) -> tuple[float, float]:
        """Two random numbers, with other rows between them."""
        import torch

        first = torch.rand((), generator=self.ctx.generator, device=self.ctx.device).item()
        await asyncio.sleep(0.001 * (row % 3))
        return first, torch.rand((), generator=self.ctx.generator, device=self.ctx.device).item()

    @method(rows="row", concurrency=PLACES)
    async def seeds(self, row: int) -> tuple[int, int]:
        """Return the seed of the row's call, and the row."""
        return self.ctx.call_seed, row

    @method(rows="mark")
    async def draws_and_dies(self, mark: Path | None) -> tuple[Path | None, float]:
        """Return a random number. Given a file that isn't there, the worker writes the number there, and dies."""
        import torch

        number = torch.rand((), generator=self.ctx.generator, device=self.ctx.device).item()
        if mark is not None and not mark.exists():
            mark.write_text(str(number))
            os.kill(os.getpid(), signal.SIGKILL)
        return mark, number

    @method(rows="row", concurrency=PLACES)
    async def begins(self, row: str) -> str:
        """Begins what has to be ended with the row, which fails, or not."""
        state = running_call.get()
        assert isinstance(state, RowState)

        async def end() -> None:
            await asyncio.sleep(0)
            self.log.append(f"{row} ended")

        state.at_end += [end, lambda: self.log.append(f"{row} ending")]
        if row == "fail":
            raise RoleError(row)
        return row

    @method(rows="row", concurrency=PLACES)
    async def add(self, row: dict[str, Any], values: list[int]) -> int:
        """Sums a row of a mapping, and what all rows have got."""
        assert row["other"].device.type == self.ctx.device.type
        return int(row["number"]) + int(row["other"].sum()) + sum(values)

    def save(self, directory: Path) -> None:
        """Save nothing: what rows draw next is saved without that."""

    def restore(self, directory: Path) -> None:
        """Do nothing."""

    @method
    def logged(self) -> list[Any]:
        """Return what has happened since this was asked last."""
        entries, self.log = self.log, []
        return entries

    @method
    def count(self) -> list[int]:
        """A value to keep."""
        return [self.ctx.rank, 1]


class Yielding(Role):
    """Rows that a batched method yields, in the reverse order."""

    def __init__(self) -> None:
        self.yielded = 0
        self.closed = ""

    @method(dispatch=Scatter("batch"))
    def all(self, batch: list[int]) -> Iterator[tuple[int, int]]:
        """Each twice as large."""
        self.yielded, self.closed = 0, "no"
        try:
            for index in reversed(range(len(batch))):
                self.yielded += 1
                yield index, 2 * batch[index]
            self.closed = "at its end"
        except GeneratorExit:
            self.closed = "before"
            raise

    @method(dispatch=Scatter("batch", balance="costs"))
    async def later(self, batch: list[int], costs: list[int] | None = None) -> AsyncIterator[tuple[int, int]]:
        """The same, awaiting something."""
        self.yielded, self.closed = 0, "no"
        try:
            for index in reversed(range(len(batch))):
                await asyncio.sleep(0)
                self.yielded += 1
                yield index, 2 * batch[index]
            self.closed = "at its end"
        except GeneratorExit:
            self.closed = "before"
            raise

    @method(dispatch=Scatter("batch"))
    def lingers(self, batch: list[int], at: int, gate: Address) -> Iterator[tuple[int, int]]:
        """Goes on from an index, or after all, until nobody reads any more."""
        self.closed = "no"
        try:
            for index in range(len(batch) + 1):
                if index == at:
                    pass_gate(gate)
                    while not self.ctx.cancelled:
                        time.sleep(0.001)
                    self.closed = "told"
                    return
                yield index, batch[index]
        except GeneratorExit:
            self.closed = "before"
            raise

    @method(dispatch=Scatter("batch"))
    async def awaits(self, batch: list[int], at: int, gate: Address) -> AsyncIterator[tuple[int, int]]:
        """As `lingers`, awaiting what never comes."""
        self.closed = "no"
        for index in range(len(batch) + 1):
            if index == at:
                try:
                    await pass_gate_async(gate)
                    await asyncio.get_running_loop().create_future()
                finally:
                    self.closed = "told" if self.ctx.cancelled else "cancelled"
            yield index, batch[index]

    @method(dispatch=Scatter("batch"))
    async def swallow(self, batch: list[str], gate: Address) -> AsyncIterator[tuple[int, str]]:
        """As that of `Playing`."""
        await _pass_gate_always(gate)
        for index, value in enumerate(batch):
            yield index, value

    @method(dispatch=Scatter("batch"))
    def wrong(self, batch: list[int], items: list[Any]) -> Iterator[tuple[int, Any]]:
        """Yields these items; raises in the place of one that is an exception."""
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    @method(dispatch=Scatter("batch"))
    def unreadable(self, batch: list[int]) -> Iterator[tuple[int, object]]:
        """Yield a value that can't be rebuilt."""
        for index in range(len(batch)):
            yield index, Unreadable()

    @method(dispatch=Scatter("batch"))
    def meets(self, batch: list[int]) -> Iterator[tuple[int, int]]:
        """Yields rows between steps that all ranks of its mesh take together."""
        import torch
        import torch.distributed as dist

        group = self.ctx.process_group("tp")
        for index, value in enumerate(batch):
            total = torch.tensor([value])
            dist.all_reduce(total, group=group)
            yield index, int(total)

    @method
    def state(self) -> tuple[int, str]:
        """How many rows were yielded, and how that ended."""
        return self.yielded, self.closed

    @method(collect=First())
    def one(self) -> int:
        return 1


class StartsAgain(Playing):
    """Waits at a gate when its group restarts, and may raise then."""

    def __init__(self, gate: Address, fails: bool = False) -> None:
        super().__init__()
        if self.ctx.generation:
            pass_gate(gate)
            if fails:
                raise RuntimeError("once was enough")
