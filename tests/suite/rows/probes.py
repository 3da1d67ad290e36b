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
    """A value that can be sent but not rebuilt."""

    def __reduce__(self) -> Any:
        return _raise_refusal, ()


class RingingRow:
    """A value that raises the signals of `rings` while it is rebuilt on the main thread."""

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
    """A role whose rows the driver gives out one by one."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    @method(rows="row", concurrency=PLACES)
    async def play(self, row: int, factor: int = 1) -> tuple[int, int]:
        """Return the row's product, and its rank."""
        self.log.append(row)
        await asyncio.sleep(0)
        assert self.ctx.row is not None
        return row * factor, self.ctx.rank

    @method(rows="row", concurrency=PLACES)
    async def wait(self, row: Any, gate: Address) -> tuple[int, int]:
        """Log the row's begin and cancellation; a row that isn't None waits at a gate."""
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
        """Raise in rows of some names; wait in the others at a gate, if there is one."""
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
        """Cancel tasks, as libraries and roles do; the row names the way."""
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
        """Fail in every third row, and log the event loop's complaints."""
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.log.append(str(context)))
        if row % 3 == 0:
            raise ValueError(row)
        await asyncio.sleep(0)
        return row

    @method(rows="row", concurrency=PLACES)
    async def ring(self, row: int) -> RingingRow:
        """Return a value that may raise a signal on the driver."""
        return RingingRow(row)

    @method(rows="row", concurrency=PLACES)
    async def swallow(self, row: str, gate: Address) -> str:
        """Wait at a gate despite cancellation; one row raises instead, when row 0 waits."""
        if row == "fail":
            while ("waits", 0) not in self.log:
                await asyncio.sleep(0)
            raise KeyError(row)
        self.log.append(("waits", self.ctx.row))
        await _pass_gate_always(gate)
        return row

    @method(rows="row", concurrency=MANY)
    async def block(self, row: int, gate: Address) -> int:
        """Wait at a gate on another thread."""
        await asyncio.to_thread(pass_gate, gate)
        return row

    @method(rows="row", concurrency=PLACES)
    async def give(self, row: int) -> object:
        """Return an even row, or a value that can't be rebuilt."""
        return Unreadable() if row % 2 else row

    @method(rows="row", concurrency=PLACES)
    async def die(self, row: Path | None) -> tuple[int, int]:
        """Kill the worker in a row whose file is missing, after making the file."""
        if row is not None and not row.exists():
            row.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.ctx.generation, self.ctx.rank

    @method(rows="row", concurrency=PLACES)
    async def draw(self, row: int) -> tuple[float, float]:
        """Draw two random numbers, with time for other rows between."""
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
        """Return a random number; in a row with a missing file, write the number there and kill the worker."""
        import torch

        number = torch.rand((), generator=self.ctx.generator, device=self.ctx.device).item()
        if mark is not None and not mark.exists():
            mark.write_text(str(number))
            os.kill(os.getpid(), signal.SIGKILL)
        return mark, number

    @method(rows="row", concurrency=PLACES)
    async def begins(self, row: str) -> str:
        """Register two functions for the end of the row, which may fail."""
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
        """Sum a mapping's row and the shared values."""
        assert row["other"].device.type == self.ctx.device.type
        return int(row["number"]) + int(row["other"].sum()) + sum(values)

    def save(self, directory: Path) -> None:
        """Save nothing: the framework saves the state of the rows' draws."""

    def restore(self, directory: Path) -> None:
        """Do nothing."""

    @method
    def logged(self) -> list[Any]:
        """Return and clear the log."""
        entries, self.log = self.log, []
        return entries

    @method
    def count(self) -> list[int]:
        """Return a value to keep."""
        return [self.ctx.rank, 1]


class Yielding(Role):
    """A role whose batched methods yield rows, mostly in reverse order."""

    def __init__(self) -> None:
        self.yielded = 0
        self.closed = ""

    @method(dispatch=Scatter("batch"))
    def all(self, batch: list[int]) -> Iterator[tuple[int, int]]:
        """Yield each row doubled."""
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
        """Yield each row doubled, with awaits between."""
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
        """Work from an index on, or after the last row, until cancelled."""
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
        """Await a future that never ends, at an index or after the last row."""
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
        """Wait at a gate despite cancellation."""
        await _pass_gate_always(gate)
        for index, value in enumerate(batch):
            yield index, value

    @method(dispatch=Scatter("batch"))
    def wrong(self, batch: list[int], items: list[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the items; raise an item that is an exception."""
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    @method(dispatch=Scatter("batch"))
    def unreadable(self, batch: list[int]) -> Iterator[tuple[int, object]]:
        """Yield values that can't be rebuilt."""
        for index in range(len(batch)):
            yield index, Unreadable()

    @method(dispatch=Scatter("batch"))
    def meets(self, batch: list[int]) -> Iterator[tuple[int, int]]:
        """Yield rows between collectives of all ranks of the mesh."""
        import torch
        import torch.distributed as dist

        group = self.ctx.process_group("tp")
        for index, value in enumerate(batch):
            total = torch.tensor([value])
            dist.all_reduce(total, group=group)
            yield index, int(total)

    @method
    def state(self) -> tuple[int, str]:
        """Return the number of yielded rows, and how the generator ended."""
        return self.yielded, self.closed

    @method(collect=First())
    def one(self) -> int:
        return 1


class StartsAgain(Playing):
    """A role that waits at a gate when its group restarts, and may then raise."""

    def __init__(self, gate: Address, fails: bool = False) -> None:
        super().__init__()
        if self.ctx.generation:
            pass_gate(gate)
            if fails:
                raise RuntimeError("once was enough")
